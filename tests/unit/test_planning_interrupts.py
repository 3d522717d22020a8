"""Ctrl-C in a long simulation: what is there by then is told, and is what a shorter run would have said."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from learner.section import dump_toml
from netem.cli.progress import Watch, watching
from netem.planning.cost_scenario import CostScenario, build_scenario, load_preset
from netem.planning.interrupts import CutShort
from netem.planning.runner import run_once, run_preset, simulate
from p2p.errors import Terminated

VALUES: dict[str, Any] = {
    "steps": 40, "warm": 3, "fleet": {"nodes": [{"kind": "a", "count": 6, "usd_per_hour": 0.4, "tokens_per_s": 700.0}]},
    "lengths": {"median": 300.0, "most": 900}, "learner": {"groups": 6, "samples": 4, "train_s": 20.0, "usd_per_hour": 3.0},
    "activation": {"all": True},
}  # fmt: skip

def scenario(detail: str, **more: Any) -> CostScenario:
    return build_scenario({**VALUES, "detail": detail, **more}, "x.toml", Path())


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The process's own, whatever a test installs."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert signal.getsignal(signal.SIGINT) == before[0]
    signal.signal(signal.SIGTERM, before[1])


@pytest.mark.parametrize("detail", ["groups", "sequences"])
@pytest.mark.parametrize(("number", "cause"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_what_is_there_is_what_a_shorter_run_says(detail: str, number: signal.Signals, cause: type) -> None:
    def tell(step: int) -> None:
        if step == 9:
            signal.raise_signal(number)

    with pytest.raises(CutShort) as cut:
        simulate(scenario(detail), tell, True, 1)
    found, short = cut.value.result, run_once(scenario(detail, steps=9)).as_dict()
    assert type(cut.value.cause) is cause and not found["ok"]
    assert found["interrupted"].startswith("step 10 of 40") and found["steps"] == 6
    for key in ("usd_per_step", "step_s", "usd_nodes", "tokens_per_s"):
        assert found[key] == pytest.approx(short[key], rel=1e-9), key


def test_before_anything_counts_nothing_is_claimed() -> None:
    with pytest.raises(CutShort) as cut:
        simulate(scenario("groups"), lambda step: signal.raise_signal(signal.SIGINT), True, 1)
    assert cut.value.result["steps"] == 0 and "usd_per_step" not in cut.value.result


def test_knobs_and_systems_that_were_done_are_kept() -> None:
    def ran(done: int, of: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(CutShort) as cut:
        simulate(scenario("groups", steps=6), lambda step: None, True, 1, ran)
    assert len(cut.value.result["would_change"]) == 2 and cut.value.result["usd_per_step"] > 0
    small = load_preset("streamrl").changed(
        {"steps": 5, "warm": 2, "learner": {"groups": 8, "train_s": 40.0}, "lengths": {"median": 400.0, "most": 2000}}
    )
    lines: list[str] = []

    def second(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            raise KeyboardInterrupt

    with pytest.raises(CutShort) as cut:
        run_preset(small, second, True, 1)
    (case,) = cut.value.result["cases"]
    assert len(case["systems"]) == 1 and cut.value.result["published"] == [] == cut.value.result["hangs_on"]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_verb_prints_it_and_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    (tmp_path / "s.toml").write_text(dump_toml({**VALUES, "detail": "groups"}))
    tell = Watch.tell

    def pressed(self: Watch, step: int) -> None:
        tell(self, step)
        if step == 9:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Watch, "tell", pressed)
    plot = tmp_path / "plot.png"
    assert shoal.main(["simulate", str(tmp_path / "s.toml"), "--plot", str(plot), *flags]) == 130
    assert not plot.exists(), "no empty one is left"
    out, err = capsys.readouterr()
    assert err.strip() == "interrupted"
    if flags:
        assert json.loads(out)["steps"] == 6
    else:
        assert "6 steps (groups)" in out and "interrupted: step 10 of 40" in out and "assumed:" in out


def test_where_there_is_no_terminal_a_line_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    said = threading.Event()
    say = Watch.say
    monkeypatch.setattr("netem.cli.progress.EVERY_S", 0.01)
    def heard(self: Watch, line: str) -> None:
        say(self, line)
        said.set()

    monkeypatch.setattr(Watch, "say", heard)
    with watching("simulating", 40) as watch:
        watch.tell(7)
        assert said.wait(60)
        watch.ran(2, 10)
        assert watch.sentence.startswith("what would change the answer: 2 of 10 runs after ")
    assert "simulating: 7 of 40 steps after 0 s" in capsys.readouterr().err
