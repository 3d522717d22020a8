"""The benchmark's pure parts: the schedule, the medians, the JSON, the expected time, how peers are configured, the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from netem.bench.broadcast.bench import (
    DEFAULT_SCENARIOS,
    ONCE,
    POLICIES,
    ContestTurn,
    TurnTally,
    row_of,
    scenario_values,
    schedule,
    select,
    static_seconds,
)
from netem.bench.broadcast.table import markdown, print_bench, write_plot
from netem.contest.contest import RoundResult
from netem.contest.players import PEERS, is_ours, peer_argv
from netem.contest.players.events import Role
from netem.contest.scenario import Scenario, build_scenario, find_scenario
from netem.contest.tuning import best_tree, player_options
from p2p.errors import UsageError

LINK = {"up_mbit": 20, "down_mbit": 50, "delay_ms": 12.5}


def scenario(payload: str = "32 MiB", nodes: int = 4, **learner: float) -> Scenario:
    profile = {"learner": {**LINK, **learner}, "nodes": [{"count": nodes, **LINK}]}
    return build_scenario({"profile": profile, "payload": payload, "name": "test"}, "x")


LARGE, SMALL = scenario(), scenario("1 MiB")


def result(times: list[float], **more: Any) -> RoundResult:
    given = {"source_bytes": 100, "duplicate_bytes": 10, "cpu_s": 1.0, "cut_off": False, "late_s": 0.002, **more}
    return RoundResult(0.0, {f"node-{i + 1}": t for i, t in enumerate(times)}, **given)


# --- the schedule --------------------------------------------------------------------------------------------------------


def test_policies_take_turns_and_the_slow_ones_take_one() -> None:
    turns = schedule([LARGE, SMALL], ["shoal", "star", "libtorrent"], 3)
    order = [(turn.policy, turn.repeat) for turn in turns if turn.scenario is LARGE]
    again = [(policy, k) for k in (1, 2) for policy in ("shoal", "libtorrent")]
    assert order == [("shoal", 0), ("star", 0), ("libtorrent", 0), *again]
    assert [turn.scenario for turn in turns] == [LARGE] * 7 + [SMALL] * 7


def test_rounds_and_cuts_of_a_turn() -> None:
    assert [ContestTurn(LARGE, p, 0).rounds for p in ("shoal", "star", "libtorrent")] == [2, 1, 1]
    assert [ContestTurn(SMALL, p, 0).rounds for p in ("shoal", "star", "libtorrent")] == [2, 2, 2]
    assert ContestTurn(LARGE, "chain", 0).cut_s == pytest.approx(5 * LARGE.t_star)
    assert ContestTurn(LARGE, "shardcast", 0).cut_s > 10 * LARGE.t_star


def test_static_policies_take_what_their_slowest_edge_takes() -> None:
    bits = 8 * 32 * 2**20
    assert static_seconds("star", LARGE) == pytest.approx(bits / 5e6)  # 20 Mbit/s for four
    assert static_seconds("chain", LARGE) == pytest.approx(bits / 20e6)
    assert static_seconds("tree", LARGE) == pytest.approx(bits / 10e6)
    assert static_seconds("star", scenario(up_mbit=1000)) == pytest.approx(bits / 50e6)  # downlinks


def test_the_default_bench_is_expected_to_fit_into_half_an_hour() -> None:
    turns = schedule([find_scenario(name) for name in DEFAULT_SCENARIOS], POLICIES, 3)
    assert len(turns) == 5 * (3 * 3 + 3)
    assert 600 < sum(turn.expected_s for turn in turns) < 1800
    worst = [turn for turn in turns if turn.policy in ONCE]
    assert all(turn.expected_s <= 10 + turn.rounds * (turn.cut_s + 1) for turn in worst)


def test_a_peer_far_behind_is_not_asked_again() -> None:
    second = ContestTurn(LARGE, "shardcast", 1)
    assert second.is_idle([2.1]) and second.is_idle([2.1, 3.0]) and not second.is_idle([2.1, 1.9]) and not second.is_idle([])
    assert not ContestTurn(LARGE, "shoal", 2).is_idle([9.0, 9.0])
    assert second.expected_s == 0.0 < ContestTurn(LARGE, "shardcast", 0).expected_s


@pytest.mark.parametrize(
    ("names", "policies", "repeat", "mtu", "why"),
    [
        (["small"], ["pigeon"], 1, None, "no policy 'pigeon'"),
        (["small"], ["shoal", "shoal"], 1, None, "comes twice"),
        (["small", "small"], ["shoal"], 1, None, "two scenarios of one name"),
        (["small"], ["shoal"], 0, None, "--repeat"),
        (["small"], ["shoal"], 1, 100, "--mtu"),
        (["blizzard"], ["shoal"], 1, None, "no scenario 'blizzard'"),
        (["killed-relay"], ["shoal"], 1, None, "killed-relay has faults"),
    ],
)
def test_what_cannot_be_measured(names: list[str], policies: list[str], repeat: int, mtu: int | None, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        select(names, policies, repeat, mtu)


def test_a_policy_without_its_extra_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    scenarios, chosen, skipped = select(["small"], ["shoal", "libtorrent"], 1, 1500)
    assert chosen == ["shoal"] and scenarios[0].profile.mtu == 1500
    assert skipped == {"libtorrent": "libtorrent is not installed: pip install 'shoal[peers]'"}
    with pytest.raises(UsageError, match=r"shardcast is not installed.*shoal\[peers\]"):
        select(["small"], ["shardcast"], 1, None)


# --- rows ----------------------------------------------------------------------------------------------------------------

T = LARGE.t_star


def row(policy: str, turns: list[list[RoundResult]], failures: tuple[str, ...] = ()) -> dict[str, Any]:
    return row_of(ContestTurn(LARGE, policy, 0), TurnTally(turns, list(failures)), {}, "bbr")


def test_medians_over_the_turns() -> None:
    turns = [
        [result([9 * T] * 4), result([T, T, T, 1.1 * T], source_bytes=200, cpu_s=3.0)],
        [result([2 * T] * 4), result([T, T, T, 1.3 * T], source_bytes=400, cpu_s=5.0, late_s=0.02)],
        [result([3 * T] * 4), result([T, T, T, 1.2 * T], source_bytes=300, cpu_s=4.0)],
    ]
    got = row("shoal", turns)
    assert got["t_max"] == pytest.approx(1.2 * T) and got["ratio"] == pytest.approx(1.2) and got["t_median"] == pytest.approx(T)
    assert (got["source_bytes"], got["duplicate_bytes"], got["cpu_s"]) == (300, 10, 4.0)
    assert got["cold_ratio"] == pytest.approx(3.0) and got["warm"] and not got["cut_off"] and got["repeats"] == 3
    assert got["ratios"] == pytest.approx([1.1, 1.3, 1.2]) and got["late_ms"] == pytest.approx(20.0)


def test_what_was_cut_off_counts_with_its_time() -> None:
    got = row("star", [[result([T, 2 * T], cut_off=True)]])
    assert got["cut_off"] and got["ratio"] == pytest.approx(5.0) and got["t_median"] == pytest.approx(3.5 * T)
    assert not got["warm"] and got["cold_ratio"] is None


def test_of_a_peer_the_better_round_counts() -> None:
    both = [result([2 * T] * 4), result([3 * T] * 4)]
    assert row("libtorrent", [both])["ratio"] == pytest.approx(2.0) and not row("libtorrent", [both])["warm"]
    assert row("shoal", [both])["ratio"] == pytest.approx(3.0)


def test_turns_that_failed_do_not_count_but_are_said() -> None:
    got = row("shardcast", [[result([1.5 * T] * 4)], [result([T], failures=("node-2: it ended",))]], ("no ready within 60 s",))
    assert got["ratio"] == pytest.approx(1.5) and got["repeats"] == 1
    assert got["failures"] == ["no ready within 60 s", "node-2: it ended"]
    nothing = row("shardcast", [], ("no ready",))
    assert nothing["ratio"] is None and nothing["t_max"] is None and nothing["repeats"] == 0


def whole() -> dict[str, Any]:
    rows = [
        row("shoal", [[result([2 * T] * 4), result([1.1 * T] * 4)], [result([2 * T] * 4), result([1.2 * T] * 4)]]),
        row("star", [[result([T], cut_off=True)]]), row("libtorrent", [], ("no ready",)),
    ]  # fmt: skip
    skipped = {"shardcast": "shardcast is not installed"}
    return {"ok": False, "scenarios": [scenario_values(LARGE, rows, "bbr", "switch")], "skipped": skipped}


def test_the_json_has_what_was_promised() -> None:
    said = json.loads(json.dumps(whole(), allow_nan=False))
    (one,) = said["scenarios"]
    assert {"name", "nodes", "payload_bytes", "t_star", "backend", "rows", "mtu", "congestion_on_hosts"} <= one.keys()
    assert (one["name"], one["nodes"], one["backend"]) == ("test", 4, "switch")
    promised = {"policy", "t_max", "t_median", "ratio", "source_bytes", "duplicate_bytes", "cpu_s"}
    assert all(promised | {"cold_ratio", "cut_off", "congestion"} <= r.keys() for r in one["rows"])


def test_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = markdown(whole())
    assert "| shoal | 1.15 | 2.00 | - | " in text and "| star | > 5.00 | - | - | > " in text and "| libtorrent | - |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    print_bench(whole())
    said = capsys.readouterr()
    assert said.out == "" and "shardcast is not installed" in said.err and "cut off" in said.err
    write_plot(whole(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# --- how players are started ---------------------------------------------------------------------------------------------


def test_our_policies_are_one_player() -> None:
    hosts = {"learner": "10.77.0.1", "a": "10.77.0.2"}
    role = Role("node", "a", hosts["a"], "/nowhere", hosts, "learner", {"congestion": "cubic"})
    assert set(POLICIES) <= set(PEERS) and [p for p in PEERS if is_ours(p)] == ["shoal", "star", "chain", "tree"]
    *_, module, text = peer_argv("tree")(role)
    assert module == "netem.contest.players.swarm" and Role.parse(text).options == {"policy": "tree", "congestion": "cubic"}


def rate_of(tree: dict[str, list[str]], scenario: Scenario) -> float:
    """The slowest edge when all are in use."""
    parents = [parent for (parent,) in tree.values()]
    up = {h.name: h.access.up for h in scenario.profile.hosts}
    return min(up[parent] / parents.count(parent) for parent in parents)


@pytest.mark.parametrize(("name", "rate"), [("homogeneous-32", 20e6), ("homogeneous-64", 20e6), ("heterogeneous", 30e6)])
def test_shardcast_gets_the_best_tree(name: str, rate: float) -> None:
    """A tree of one parent a host cannot do better: 8 edges at 30 Mbit/s need uplinks that hold 8 of them."""
    found = find_scenario(name)
    tree = best_tree(found.profile)
    assert set(tree) == {h.name for h in found.profile.hosts[1:]} and rate_of(tree, found) == pytest.approx(rate)
    reached = {"learner"}
    for host, (parent,) in tree.items():
        assert parent in reached
        reached.add(host)
    options = player_options("shardcast", found.profile, found.payload_bytes)
    assert options["upstream"] == tree and 2**17 <= options["shard_bytes"] <= 2**22


def test_shoal_is_told_no_rate() -> None:
    assert set(player_options("shoal", LARGE.profile, 1)) <= {"congestion"}


@pytest.mark.parametrize("rank", [0, 2])
def test_the_wan_bench_draws_updates_that_only_move_what_is_trained(tmp_path: Path, rank: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from netem.bench.wan.updates import Updates

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    updates = Updates(tmp_path, rank, 1e-2)
    before = updates.state()
    updates.step()
    after = updates.state()
    moved = {name for name in before if (before[name][1] != after[name][1]).any()}
    adapter = {name for name in before if name.startswith("adapter.")}
    assert moved == (adapter if rank else set(before)) and len(adapter) == (14 if rank else 0)
    assert after.keys() == before.keys() and {kind for kind, _ in after.values()} == {"bfloat16"}
