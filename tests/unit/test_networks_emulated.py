"""Which drawn networks are emulated, how they are scaled, and what is said of what came of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

import shoal
from netem.bench.networks import emulate
from netem.bench.networks.draw import draw_network
from netem.bench.networks.emulate import CARRIED, EmulatedNetwork, bench_emulated, fits, scaled, summary, told
from netem.contest.scenario import Scenario
from netem.networks.bound import profile_bound
from p2p.errors import ShoalError, UsageError

FITTING = [n for n in (draw_network(1, i) for i in range(40)) if fits(n)]


@pytest.mark.parametrize("network", FITTING, ids=lambda n: n.name)
def test_a_scaled_network_has_the_same_bound_and_is_carried(network) -> None:
    small = scaled(network)
    t_star = profile_bound(network.profile, network.payload)
    assert profile_bound(small.profile, small.payload) == pytest.approx(t_star, rel=1e-3)
    assert 8 * small.payload * (len(small.profile.hosts) - 1) / t_star <= CARRIED * 1.001
    assert small.payload == int(network.payload * small.profile.scale)
    assert [h.access.delay for h in small.profile.hosts] == [h.access.delay for h in network.profile.hosts]


def test_rates_that_change_many_nodes_and_long_versions_are_left_out() -> None:
    drawn = [draw_network(1, i) for i in range(60)]
    assert {n.kind for n in drawn if fits(n)} == {"steady"} and len(FITTING) > 5
    assert max(len(n.profile.hosts) for n in drawn if fits(n)) <= emulate.MOST_NODES + 1
    changing = next(n for n in drawn if n.kind != "steady")
    with pytest.raises(UsageError, match=f"{changing.name} is not emulated"):
        bench_emulated([changing.name], count=1, seed=1, say=print)
    with pytest.raises(UsageError, match="no congestion control 'foo'"):
        bench_emulated([FITTING[0].name], count=1, seed=1, congestion="foo", say=print)
    with pytest.raises(UsageError, match="0 networks"):
        bench_emulated([], count=0, seed=1, say=print)


def outcome(seconds: float | None, *, sent: float = 1.0, failures: tuple[str, ...] = ()) -> dict[str, Any]:
    """A round as `round_values` has it, as far as it is read."""
    return {
        "t_max": seconds, "source_share": sent, "duplicate_bytes": 0, "dropped": 0, "late_ms": 0.0, "failures": list(failures)
    }  # fmt: skip


def test_each_is_beside_the_simulator_and_libtorrent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three networks: the emulation is as the simulator says; a player fails, and libtorrent's last version is cut off; no player
    comes up."""
    near, far, none = islice(FITTING, 3)
    said: list[str] = []
    simulated = emulate.measure_network(scaled(near)).versions[1].t_max

    def run(scenario: Scenario, backend: str) -> dict[str, Any]:
        ours, versions = scenario.policy == "shoal", scenario.warm_up + scenario.rounds
        assert backend == "switch" and versions == min(scenario.rounds + 1, emulate.VERSIONS) and not scenario.faults
        if scenario.name == none.name:
            raise ShoalError("players do not answer")
        rounds = [outcome(9.0), *(outcome(simulated * (1.05 if ours else 1.5)) for _ in range(versions - 1))]
        if scenario.name == far.name:
            rounds[1 if ours else -1 :] = [outcome(None, failures=("node-1: it ended",) if ours else ())]
        return {"rounds": rounds}

    monkeypatch.setattr(emulate, "run_scenario", run)
    monkeypatch.setattr(emulate, "missing", lambda peer: None)
    names = [near.name, far.name, none.name]
    result = bench_emulated(names, count=1, seed=1, backend="switch", say=said.append)
    one, *others = result["networks"]
    assert one["near"] and one["ahead"] and one["emulated"] == pytest.approx(1.05 * simulated) and one["copies"] == 1.0
    assert one["libtorrent"] == pytest.approx(1.5 * simulated) and one["first"] == 9.0 and one["failures"] == []
    for other in others:
        assert other["emulated"] is other["libtorrent"] is other["r"] is None and not other["near"] and not other["ahead"]
    assert [other["first"] for other in others] == [9.0, None]
    assert others[0]["failures"] == ["shoal: node-1: it ended", "libtorrent: cut off"]
    assert others[1]["failures"] == ["shoal: players do not answer", "libtorrent: players do not answer"]
    assert not result["ok"] and (result["near"], result["ahead"]) == (1, 1)
    assert "players do not answer" in said[-2] and said[-1] == "of 3 networks 1 within 10% of the simulator, 1 before libtorrent"
    json.dumps(result, allow_nan=False)


def test_flags_of_an_emulation_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--alone"], ["--congestion", "cubic"]):
        assert shoal.main(["bench", "networks", *flags]) == 2
        assert capsys.readouterr().err.count("--emulate") == 1


def test_who_did_not_end_is_neither_near_nor_ahead() -> None:
    whole = EmulatedNetwork(
        FITTING[0], 1.0, simulated=1.1, emulated=1.2, other=None, first=2.0, copies=1.0, duplicates=0.1, dropped=7,
        late_s=0.02,
    )  # fmt: skip
    assert whole.near and whole.ahead
    assert "0.10 came twice, 7 packets dropped" in told(whole) and "the emulator 20 ms late" in told(whole)
    assert not replace(whole, emulated=1.3).near and not replace(whole, other=1.15).ahead
    assert summary([whole], against=True)["ok"] and not summary([replace(whole, other=1.0)], against=True)["ok"]
    assert summary([replace(whole, other=1.0)], against=False) | {"networks": 0} == {
        "ok": True, "count": 1, "near": 1, "ahead": None, "networks": 0
    }  # fmt: skip
