"""Answers that are code and want their reward without the work. Each runs in the real sandbox, in its own processes."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from learner.rewards.group_scorer import PooledScorer
from learner.rewards.port import Answer
from learner.rewards.settings import RewardPart, RewardSettings
from learner.tasks.port import Prompt, Task

TESTS = [
    "assert f(2) == 4",
    "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == 2 * x\ncheck(f)",
    "import math\nassert abs(f(1.5) - 3.0) < 1e-6 and all(f(x) == 2 * x for x in range(4)) and math.isfinite(f(1))",
]

FORGED = struct.pack(">d?", 1.0, True)
"""A reward as the scoring process hears it, after the letter S."""

CLAIM = f"""
import os
def claim():
    for fd in range(3, 64):
        try:
            os.write(fd, b"S" + {FORGED!r})
        except OSError:
            pass
"""

HACKS = {
    "equal to all": """
class E:
    __eq__ = __lt__ = __sub__ = __abs__ = lambda *_: True
    __hash__ = None
f = lambda x: E()
""",
    "a number of its own": """
class I(int):
    __eq__ = lambda *_: True
    __sub__ = lambda *_: 0
f = lambda x: I(7)
""",
    "ends the process": "import os; os._exit(0)",
    "ends it when asked": "import os; f = lambda x: os._exit(0)",
    "raises SystemExit": "import sys; f = lambda x: sys.exit(0)",
    "other builtins": """
import builtins
builtins.abs = lambda x: 0
builtins.all = lambda x: True
f = lambda x: 3
""",
    "own abs and all": "abs = lambda x: 0; all = lambda x: True; check = lambda c: None; f = lambda x: 3",
    "no assertions": """
import builtins
class Quiet(BaseException): pass
builtins.AssertionError = Quiet
f = lambda x: 3
""",
    "tells the reward": CLAIM + "claim(); f = lambda x: 3",
    "tells it late": CLAIM + "f = lambda x: claim() or os._exit(0)",
    "answers for all time": """
import msgpack, os, struct
data = msgpack.packb({"value": True})
os.write(4, (struct.pack(">I", len(data)) + data) * 100)
f = lambda x: 3
""",
    "looks for the tests": """
import gc
for o in gc.get_objects():
    if isinstance(o, dict) and "f" in o: o["f"] = lambda x: 2 * x
f = lambda x: 3
""",
    "another frame's names": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        frame.f_globals["check"] = lambda c: None
        frame = frame.f_back
    return 3
""",
    "no function": "pass",
    "endless": "while True: pass",
    "all memory": "f = lambda x: [0] * (1 << 34)",
    "deep": """
def f(x):
    v = 3
    for _ in range(300): v = [v]
    return v
""",
}


class Rows(Task):
    """One row, again and again."""

    name = "rows"

    def __init__(self, tests: list[Any]) -> None:
        self.row = {"tests": tests}

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, "double it", self.row)


async def rewards(tests: list[Any], *answers: str) -> list[float]:
    settings = RewardSettings(reward=[RewardPart(function="unit_tests")], reward_s=5.0)
    with PooledScorer(Rows(tests), settings, allow_unconfined=True) as scorer:
        return [score.reward for score in await scorer.score(0, [Answer(text, "node") for text in answers])]


@pytest.mark.parametrize("name", HACKS)
async def test_no_answer_claims_its_own_reward(name: str) -> None:
    """Beside it an honest answer has its reward, before and after."""
    honest = "def f(x):\n    return 2 * x"
    assert await rewards(TESTS, honest, HACKS[name], honest) == [1.0, 0.0, 1.0]


PRINTED = [{"input": "3\n4", "output": "7\n"}]


@pytest.mark.parametrize("hack", ["print(8)", "import os; os._exit(0)", "import sys; sys.stdout = None", "raise SystemExit(0)"])
async def test_no_program_claims_what_it_did_not_print(hack: str) -> None:
    assert await rewards(PRINTED, hack, "print(int(input()) + int(input()))") == [0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "test"),
    [
        ("def f(x): x.sort(); x.append(9)", "given = [3, 1]\nf(given)\nassert given == [1, 3, 9]"),
        ("def f(d): d['n'] = {1, 2}", "given = {}\nf(given)\nassert given == {'n': {1, 2}}"),
        ("class S:\n    def __init__(self): self.all = []\n    def push(self, x): self.all.append(x)\n"
         "    def pop(self): return self.all.pop()\n    def __len__(self): return len(self.all)",
         "s = S()\ns.push((1, 'a'))\nassert len(s) == 1\nassert s.pop() == (1, 'a')"),
        ("def f(n):\n    for i in range(n): yield i * i", "assert list(f(4)) == [0, 1, 4, 9]"),
        ("def f(x):\n    if x < 0: raise ValueError('below 0')\n    return x",
         "try:\n    f(-1)\nexcept ValueError as error:\n    assert 'below' in str(error)\nelse:\n    assert False"),
        ("f = lambda n: 7 ** n", "assert f(100) == 7 ** 100 and f(2) == 49"),
        ("f = lambda *a, k=1: (a, k, None, 1.5, b'x', frozenset({1}), {'a': [1]}, 2j, float('inf'))",
         "assert f(1, (2,), k='z') == ((1, (2,)), 'z', None, 1.5, b'x', frozenset({1}), {'a': [1]}, 2j, float('inf'))"),
        ("LIMIT = 3\ndef f(g): return g", "assert LIMIT == 3 and f(f) is not None"),
        ("class M:\n    def __init__(self, v): self.v = v\n    def __getitem__(self, i): return self.v[i]",
         "assert M([4, 5])[1] == 5\nassert M('ab').v == 'ab'"),
    ],
)  # fmt: skip
async def test_honest_answers_of_many_forms_have_their_reward(answer: str, test: str) -> None:
    assert await rewards([test], answer, "pass") == [1.0, 0.0]
