"""Evaluation is the nodes': the trainer takes no part in it, and `shoal bench evaluation` does its sums right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from learner.client import messages
from netem.bench.beside.evaluation import EvaluationLook, account, describe
from p2p.errors import ShoalError
from p2p.protocol.wire import Message


def test_the_trainer_s_process_knows_nothing_of_evaluation() -> None:
    """Neither the code of it, nor prompts and rewards to do it with, nor a message that could ask for it."""
    rooms = "evaluation", "requests", "rewards", "rollouts", "head", "endpoint"
    program = f"""
import json, sys
import learner.trainer.trainer
print(json.dumps([m for m in sys.modules if m.startswith({tuple(f"learner.{room}" for room in rooms)!r})]))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == []
    told = [m for m in vars(messages).values() if isinstance(m, type) and issubclass(m, Message)]
    assert len(told) > 10
    assert not [m for m in told if "eval" in " ".join((m.__name__, *m.__struct_fields__)).lower()]


def line(step: int, time: float, wait: float) -> dict[str, float]:
    return {
        "step": step, "time": time, "time/step": wait + 2.0, "time/wait_for_batch": wait, "time/train": 1.0, "time/commit": 0.5,
        "time/publish": 0.5,
    }  # fmt: skip


def test_steps_beside_an_evaluation_are_told_from_the_others() -> None:
    lines = [line(4, 100.0, 9.0), line(5, 103.0, 1.0), line(6, 107.0, 2.0), line(7, 110.025, 1.0), line(8, 190.0, 70.0)]
    lines.insert(3, {"step": 5, "time": 106.0, "eval/seconds": 2.5})
    seen = [
        EvaluationLook(4, False, 0, 1000), EvaluationLook(5, True, 0, 1500), EvaluationLook(6, False, 90, 2500),
        EvaluationLook(7, False, 100, 3000),
    ]  # fmt: skip
    found = account(lines, seen, 4, 7)
    assert (found["steps"], found["evaluations"], found["evaluation_s"]) == (3, 1, [2.5])
    assert found["wall_s"] == pytest.approx(10.025) and found["tokens_share"] == 0.05
    assert (found["by_step"]["beside"]["steps"], found["by_step"]["beside"]["time/wait_for_batch"]) == (1, 2.0)
    assert (found["by_step"]["without"]["steps"], found["by_step"]["without"]["time/step"]) == (2, 3.0)
    assert found["later_share"] == pytest.approx(1 / 10.025)  # one step waited a second longer than the others
    assert found["held_up_share"] == pytest.approx(-0.0125 / 10.025) and found["ok"]
    assert "took 5.0% of the nodes' tokens" in describe(found) and "for 10.0% of its time" in describe(found)


def test_a_trainer_that_is_held_up_between_its_steps_is_found_out() -> None:
    lines = [line(1, 0.0, 1.0), line(2, 3.0, 1.0), line(3, 6.0, 1.0)]
    lines += [{"step": 1, "eval/seconds": 1.0}, {"step": 2, "eval/seconds": 1.0}]
    seen = [EvaluationLook(1, True, 0, 10), EvaluationLook(2, False, 5, 20), EvaluationLook(3, False, 5, 30)]
    assert account(lines, seen, 1, 3)["ok"]
    lines[1]["time"], lines[2]["time"] = 3.1, 6.1
    found = account(lines, seen, 1, 3)
    assert found["held_up_share"] == pytest.approx(0.1 / 6.1) and not found["ok"] and "NOT OK" in describe(found)
    with pytest.raises(ShoalError, match="2 lines of 3 steps"):
        account(lines[1:], seen, 1, 3)
