"""What nodes and their CPU engines import, imported. Only for the process that forks them: see `netem.processes.forked`."""

from __future__ import annotations

import node.engine.transformers
import node.service  # noqa: F401
from p2p.channel.yamux import load_stack
from p2p.codec import warm
from p2p.processes import die_with_parent

die_with_parent()  # a forkserver goes on for as long as any of its children, and they end when it does
load_stack()
warm()
