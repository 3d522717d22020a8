"""Shoal's own peers behind NATs of all kinds: how each pair comes to be linked, and that the payload reaches those that are not.
Needs root, TUN, nft and miniupnpd."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from netem.contest.scenario import build_scenario
from netem.contest.trial import run_scenario
from netem.emulation.homes import why_no_nat
from tests.wan.test_switch import WHY_NOT

LACKING = "" if shutil.which("miniupnpd") else "the program miniupnpd is missing: apt-get install miniupnpd"
WHY = WHY_NOT or why_no_nat() or LACKING
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "-")

LINK = {"up_mbit": 50.0, "down_mbit": 50.0, "delay_ms": 5.0, "queue_ms": 100.0}


def run(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    profile = {"mtu": 9000, "learner": {**LINK, "nat": "cone", "forward": [4001]}, "nodes": [{**LINK, **node} for node in nodes]}
    return run_scenario(build_scenario({"profile": profile, "payload": "1 MiB", "warm_up": 0}, "test"), backend="switch")


def pairs(result: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(pair["one"], pair["other"]): pair["kind"] for pair in result["rounds"][-1]["pairs"]}


def test_nodes_behind_nats_of_all_kinds_are_linked_by_what_works() -> None:
    nodes: list[dict[str, Any]] = [
        {"name": "open"}, {"name": "wall", "nat": "firewall"}, {"name": "cone", "nat": "cone"}, {"name": "cgnat", "nat": "cgnat"},
        {"name": "mapped", "nat": "cone", "upnp": True}, {"name": "symmetric", "nat": "symmetric"},
        {"name": "flat", "count": 2, "nat": "cone", "home": "flat"},
    ]  # fmt: skip
    result = run(nodes)
    assert result["rounds"][-1]["t_max"] is not None, "all had the payload"
    found = pairs(result)
    assert len(found) == 28
    for pair, kind in found.items():
        behind = set(pair) - {"open", "mapped"}
        if pair == ("flat-1", "flat-2"):
            assert kind == "direct IPv4", "over their own LAN"
        elif "symmetric" in pair:
            assert kind == ("relayed" if len(behind) == 2 else "mapped port" if "mapped" in pair else "direct IPv4"), pair
        elif len(behind) == 2:
            assert kind == "met", pair
        else:
            assert kind in ("direct IPv4", "mapped port", "met"), pair
    why = next(pair["why"] for pair in result["rounds"][-1]["pairs"] if pair["one"] == "cone" and pair["other"] == "symmetric")
    assert "another port for each connection (symmetric)" in why


def test_where_nobody_can_be_met_the_broadcast_goes_on() -> None:
    result = run([{"name": "symmetric", "count": 3, "nat": "symmetric"}])
    assert result["rounds"][-1]["t_max"] is not None
    assert pairs(result) and set(pairs(result).values()) == {"relayed"}
