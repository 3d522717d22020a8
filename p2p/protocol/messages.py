"""Reads whatever a peer of the swarm may say. Must not know what is said when, nor by whom."""

from __future__ import annotations

from p2p.protocol import generation, join, prices, reach, versions
from p2p.protocol.wire import Decoder

decode = Decoder(vars(join), vars(versions), vars(generation), vars(prices), vars(reach))
