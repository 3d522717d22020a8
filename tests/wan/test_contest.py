"""One small real round (and a second, for what the first leaves behind) of each peer over three nodes. How fast they are is not
asked here. Needs root, TUN and the extra `peers`."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec

import pytest

from netem.contest.contest import RoundResult, run_contest
from netem.contest.players import PEERS, is_ours, peer_argv
from netem.contest.players.events import Role
from netem.contest.tuning import player_options
from netem.emulation.backends import why_not_tc
from netem.networks.bound import profile_bound
from netem.networks.faults import Outage, SetRates
from netem.networks.profile import Profile, build_profile
from p2p.errors import ShoalError
from tests.support.watchdog import PATIENCE_S
from tests.wan.test_switch import WHY_NOT

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
NO_HTB = WHY_NOT or why_not_tc(netem=False)

SIZE = 1_000_003
NODES = {"node-1", "node-2", "node-3"}


def network() -> Profile:
    link = {"up_mbit": 50.0, "down_mbit": 50.0, "delay_ms": 2.0}
    return build_profile({"mtu": 9000, "learner": link, "nodes": [{"count": 3, **link}]}, "test")


def left_behind() -> list[str]:
    return [name for name in os.listdir("/run/netns") if name.startswith("shoal-")]


def check(results: list[RoundResult]) -> None:
    assert [r.failures for r in results] == [(), ()]
    for result in results:
        assert not result.cut_off and result.verified.keys() == NODES
        assert all(seconds > 0 for seconds in result.verified.values())
        assert result.source_bytes >= SIZE, "the source sent it at least once"
        assert result.cpu_s > 0 and result.congestion
    assert results[1].published_at > results[0].published_at


@pytest.mark.parametrize("peer", sorted(PEERS))
def test_a_peer_serves_three_nodes(peer: str) -> None:
    if not is_ours(peer) and find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed (extra peers)")
    if peer == "shardcast" and shutil.which("wget") is None:
        pytest.skip("shardcast needs wget")
    before = set(left_behind())
    options = player_options(peer, network(), SIZE)
    check(run_contest(network(), peer_argv(peer), SIZE, rounds=2, seed=3, cut_s=PATIENCE_S, options=options))
    assert set(left_behind()) <= before


def test_sites_and_groups_over_real_connections() -> None:
    """Two sites of two, on fast LANs; then five nodes in two groups, not all linked. Each node's bytes are accounted for."""
    link, lan = {"up_mbit": 20.0, "down_mbit": 50.0, "delay_ms": 5.0}, {"up_mbit": 80.0, "down_mbit": 80.0}
    sites = [{"name": site, "count": 2, "site": site, **link} for site in ("east", "west")]
    profile = build_profile({"mtu": 9000, "sites": {"east": lan, "west": lan}, "learner": link, "nodes": sites}, "test")
    for result in run_contest(profile, peer_argv("shoal"), SIZE, 2, 3, PATIENCE_S):
        assert not result.failures and len(result.verified) == 4 and result.whence.keys() == result.verified.keys()
        for site in ("east", "west"):
            came = [(h, size) for n, whence in result.whence.items() if n.startswith(site) for h, size in whence.items()]
            assert SIZE <= sum(size for _, size in came) <= 3 * SIZE
            assert SIZE <= sum(size for h, size in came if not h.startswith(site)) <= 1.25 * SIZE
    profile = build_profile({"mtu": 9000, "learner": link, "nodes": [{"count": 5, **link}]}, "test")
    for result in run_contest(profile, peer_argv("shoal"), SIZE, 2, 3, PATIENCE_S, {"mesh": 2}):
        assert not result.failures and len(result.verified) == 5
        assert all(sum(whence.values()) >= SIZE for whence in result.whence.values())


@pytest.mark.skipif(bool(NO_HTB), reason=f"back end tc: {NO_HTB}")
def test_a_contest_over_the_kernels_own_queues() -> None:
    """Without delays, which most kernels can do; a rate that falls and an outage are brought about as well."""
    link = {"up_mbit": 50.0, "down_mbit": 50.0}
    profile = build_profile({"mtu": 9000, "learner": link, "nodes": [{"count": 3, **link}]}, "test")
    faults = [SetRates(at=0.1, host="node-1", up=25e6, down=25e6), Outage(at=0.2, seconds=0.4, host="node-2")]
    before = set(left_behind())
    first, second = run_contest(profile, peer_argv("shoal"), 4 * SIZE, 2, 3, PATIENCE_S, faults=faults, backend="tc")
    for result in (first, second):
        assert not result.failures and result.verified.keys() == NODES and result.backend == "tc" and result.late_s == 0
        assert result.seconds > 0.9 * profile_bound(profile, 4 * SIZE), "the links are as slow as they should be"
    assert second.faults == tuple(faults) and second.seconds > max(0.6, 8 * 4 * SIZE / 25e6 * 0.8)
    assert set(left_behind()) <= before


DEAF = """
import sys, time
from pathlib import Path
from netem.contest.players.events import Player, Role, RoundTraffic, serve
class Deaf(Player):
    def __init__(self, role):
        self.mark, self.fails = Path(role.directory).parent / "published", role.name == role.options.get("fails")
    def prepare(self, command, payload, digest): return {}
    def expect(self, command): pass
    def publish(self, round): self.mark.touch()
    def poll(self):
        if self.fails and self.mark.exists(): raise ValueError("out of luck")
    def traffic(self): return RoundTraffic(0, 0, 0)
    def close(self): time.sleep(3600)
sys.exit(serve(sys.argv, Deaf))
"""


def deaf(role: Role) -> list[str]:
    return [sys.executable, "-c", DEAF, role.text()]


def test_a_round_without_an_end_is_cut_off_and_nothing_is_left() -> None:
    """Its players do not end by themselves either."""
    before = set(left_behind())
    (result,) = run_contest(network(), deaf, SIZE, rounds=3, seed=1, cut_s=0.5)
    assert result.cut_off and result.verified == {} and result.failures == ()
    assert set(left_behind()) <= before


def test_a_node_that_fails_ends_the_contest() -> None:
    (result,) = run_contest(network(), deaf, SIZE, rounds=3, seed=1, cut_s=PATIENCE_S, options={"fails": "node-2"})
    assert result.failures == ("node-2: ValueError('out of luck')",) and not result.cut_off


def test_players_that_do_not_start_say_why() -> None:
    before, babbling = set(left_behind()), [sys.executable, "-c", "print('?')"]
    with pytest.raises(ShoalError, match=r"learner: it ended: .*no-such-module"):
        run_contest(network(), lambda role: [sys.executable, "-m", "no-such-module"], SIZE, 1, 1, 1.0)
    with pytest.raises(ShoalError, match=r"node-2: no event: "):
        run_contest(network(), lambda r: babbling if r.name == "node-2" else deaf(r), SIZE, 1, 1, 1.0)
    assert set(left_behind()) <= before
