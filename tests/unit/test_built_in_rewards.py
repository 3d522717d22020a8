"""The built-in reward functions: what is right, what is not, and what rows they refuse."""

from __future__ import annotations

import importlib.util
import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from learner.rewards import confined
from learner.rewards.built_in import BUILT_IN, BuiltIn, make_built_in
from learner.rewards.examinee import Examinee
from learner.rewards.examiner import AnswerProcess
from learner.rewards.group_scorer import PooledScorer
from learner.rewards.judge import make_judge
from learner.rewards.plain_values import DEEPEST, from_plain, to_plain
from learner.rewards.port import Answer, GroupUnscored
from learner.rewards.settings import RewardPart, RewardSettings
from learner.tasks.port import Prompt, Task
from p2p.errors import UsageError

FENCED = "So:\n```python\ndef f(x):\n    return 2 * x\n```\nThat is it."

VERIFIER, SCHEMAS = (
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("math_verify", "jsonschema")
)


def value(name: str, row: dict[str, Any], completion: str, **options: Any) -> float | None:
    """What a completion is worth; None where the function does not apply to the row."""
    function = make_built_in(name, options)
    wanted = function.wanted(row)
    if wanted is not None and function.examined:
        return examined(function, wanted, completion)
    return None if wanted is None else function.score(wanted, completion)


def examined(function: BuiltIn, wanted: Any, completion: str) -> float:
    """With the answer's code in a thread; its process is in tests/attacks/test_answers.py."""
    ours, theirs = socket.socketpair()
    with ours, ThreadPoolExecutor(1) as pool, theirs:
        serving = pool.submit(Examinee(function.code_of(completion)).serve, theirs)
        worth = function.examine(wanted, AnswerProcess(ours))
        ours.shutdown(socket.SHUT_RDWR)
        serving.result()
        return worth


@pytest.mark.parametrize(
    ("name", "options", "row", "right", "wrong"),
    [
        ("exact", {}, {"answer": "4"}, " 4\n", "4."),
        ("exact", {"ignore_case": True}, {"answer": "Paris"}, "paris", "Rome"),
        ("exact", {"column": "n"}, {"n": 12}, "12", "13"),
        ("boxed", {}, {"answer": r"\frac{1}{2}"}, r"first \boxed{3}, then \boxed{ \frac{1}{2} }.", r"\boxed{\frac{1}{2}"),
        ("boxed", {}, {"answer": "4"}, r"\boxed{4}", "4"),
        ("tagged", {}, {"answer": "4"}, "<answer>5</answer> no: <answer> 4 </answer>", "<answer>4"),
        ("tagged", {"tag": "final"}, {"answer": "4"}, "<final>4</final>", "<answer>4</answer>"),
        ("regex", {"pattern": r"^\d+$"}, {}, "42", "x42"),
        ("regex", {"pattern": r"= (\d+)", "column": "answer"}, {"answer": 4}, "2+2 = 4", "2+2 = 5"),
        ("regex", {"pattern_column": "p"}, {"p": "a+b"}, "xaab", "b"),
        ("unit_tests", {}, {"tests": ["assert f(1) == 2", "assert f(2) == 4"]}, FENCED, "def f(x): return None"),
        ("unit_tests", {}, {"tests": "assert f(1) == 2"}, "f = lambda x: 2", "raise SystemExit"),
        ("unit_tests", {}, {"tests": [{"input": "3\n4", "output": "7\n"}]}, "print(int(input()) + int(input()))", "print(8)"),
        pytest.param("math_verify", {}, {"answer": "1/2"}, r"So \boxed{\frac{2}{4}}", r"\boxed{\frac{1}{3}}", marks=VERIFIER),
        pytest.param("math_verify", {}, {"answer": r"\frac{1}{2}"}, "the answer is $0.5$", "I do not know", marks=VERIFIER),
        pytest.param("json_schema", {"schema": {"required": ["a"]}}, {}, '```json\n{"a": 1}\n```', "{}", marks=SCHEMAS),
        pytest.param("json_schema", {}, {"schema": '{"type": "array"}'}, "[1]", "not JSON", marks=SCHEMAS),
    ],
)  # fmt: skip
def test_right_and_wrong_answers(name: str, options: dict[str, Any], row: dict[str, Any], right: str, wrong: str) -> None:
    assert (value(name, row, right, **options), value(name, row, wrong, **options)) == (1.0, 0.0)
    for babble in ("", "\x00\ud800é", "{" * 3000, "```" * 9):
        assert value(name, row, babble, **options) == 0.0


def test_some_tests_passed_are_some_reward() -> None:
    row = {"tests": ["assert f(1) == 2", "assert f(2) == 5"]}
    assert value("unit_tests", row, FENCED) == 0.5
    assert value("unit_tests", row, FENCED, all_or_nothing=True) == 0.0


def test_a_row_without_an_answer_is_not_judged() -> None:
    assert value("exact", {"answer": None}, "x") is None


@pytest.mark.parametrize(
    ("name", "options", "row", "why"),
    [
        ("exact", {}, {"question": "?"}, r"no column 'answer' \(it has 'question'\)"),
        ("unit_tests", {}, {"tests": []}, "no tests"),
        ("unit_tests", {}, {"tests": ["assert ("]}, "a test is not Python"),
        ("unit_tests", {}, {"tests": [{"input": ""}]}, "has input and output"),
        ("regex", {"pattern_column": "p"}, {"p": "("}, "no regular expression"),
        pytest.param("json_schema", {}, {"schema": "{"}, "is not JSON", marks=SCHEMAS),
        pytest.param("json_schema", {}, {"schema": {"type": "objekt"}}, "the schema is none", marks=SCHEMAS),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_are_refused(name: str, options: dict[str, Any], row: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        value(name, row, "x", **options)


def test_options_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match=r"exact with the options \{'colum': 'a'\}.*unexpected"):
        make_built_in("exact", {"colum": "a"})
    with pytest.raises(UsageError, match="no regular expression"):
        make_built_in("regex", {"pattern": "("})
    assert {name for name, kind in BUILT_IN.items() if kind.runs_answers} == {"math_verify", "unit_tests"}
    assert all(kind.confined for kind in BUILT_IN.values() if kind.runs_answers)
    assert {name for name, kind in BUILT_IN.items() if kind.examined} == {"unit_tests"}


def test_only_plain_data_comes_back() -> None:
    nothing = lambda value: (_ for _ in ()).throw(TypeError(type(value).__name__))
    some = [None, True, -1, 1 << 200, -(1 << 90), 1.5, float("inf"), "é\ud800", b"\0", 2j, [], (1, (2,)), {1, 2}, frozenset()]
    for one in (*some, {(1,): [{}]}):
        back = from_plain(to_plain(one, nothing), nothing)
        assert back == one and type(back) is type(one)
    deep: list[Any] = []
    for _ in range(DEEPEST + 1):
        deep = [deep]
    for wrong in (object(), type("L", (list,), {})(), type("I", (int,), {})(3), deep):
        with pytest.raises(TypeError):
            to_plain(wrong, nothing)
    for said in ([], ["nothing", 1], ["int"], ["dict", 1], ["int", []], ["set", ["list"]]):
        with pytest.raises(ValueError, match="not a plain value"):
            from_plain(said, nothing)


class Row(Task):
    """One row of data, again and again."""

    name = "row"

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, "?", self.row)


async def scored(function: str, row: dict[str, Any], *texts: str, options: dict[str, Any] | None = None) -> list[float]:
    settings = RewardSettings(reward=[RewardPart(function=function, options=options or {})], reward_s=2.0)
    with PooledScorer(Row(row), settings, allow_unconfined=True) as scorer:
        return [score.reward for score in await scorer.score(0, [Answer(text, "a") for text in texts])]


async def test_confined_functions_score_in_their_process() -> None:
    endless = "(a+)+$"
    assert await scored("regex", {}, "b", "a" * 40 + "!", "aaa", options={"pattern": f"^b|^{endless}"}) == [1.0, 0.0, 1.0]
    secret = "f = lambda x: open('/etc/hostname').read() and 1"
    assert await scored("unit_tests", {"tests": ["assert f(0)"]}, "f = bool", secret, "f = lambda x: 1") == [0.0, 0.0, 1.0]
    with pytest.raises(GroupUnscored, match="problem 0: reward function unit_tests: column 'tests' has no tests"):
        await scored("unit_tests", {"tests": []}, "x", "y")


@VERIFIER
async def test_math_verify_runs_confined() -> None:
    assert await scored("math_verify", {"answer": "1/2"}, "$0.5$", "$0.4$", "\\boxed{9^{9^{9^9}}}") == [1.0, 0.0, 0.0]


@VERIFIER
@pytest.mark.parametrize(("function", "options", "says"), [("math_verify", {}, True), ("unit_tests", {}, False),
                                                           ("regex", {"pattern": "4"}, False)])  # fmt: skip
def test_at_the_start_it_is_said_once_which_rewards_an_answer_may_claim(
    function: str, options: dict[str, Any], says: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any answer is scored. The code of `unit_tests` runs where it cannot tell a reward; a pattern runs no answer."""
    monkeypatch.setattr(confined, "_told", set())  # an earlier test of this process may have had it said
    settings = RewardSettings(reward=[RewardPart(function=function, options=options)])
    row = {"answer": "4", "tests": ["assert f(0)"]}
    with caplog.at_level(logging.WARNING, "shoal.scoring"):
        for _ in range(2):
            with PooledScorer(Row(row), settings, allow_unconfined=True):
                pass
    told = [r.getMessage() for r in caplog.records if "can claim its own reward" in r.getMessage()]
    assert len(told) == says and all(text.startswith(f"reward {function} runs answers as code") for text in told)


# --- the judge -------------------------------------------------------------------------------------------------------


Asked = tuple[str, list[dict[str, Any]]]
"""The judge's URL, and what it was asked."""


@pytest.fixture
def judge_url() -> Iterator[Asked]:
    """A server that rates by what it is asked: the number after "rate:", or a busy status once."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({**body, "key": self.headers["Authorization"], "path": self.path})
            said = body["messages"][0]["content"].rpartition("rate:")[2].split()[0]
            status = 429 if said == "busy" and len(asked) == 1 else 200
            data = json.dumps({"choices": [{"message": {"content": f"I say 3. Or {said}"}}]}).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()
        thread.join()


async def test_a_judge_rates_each_completion(judge_url: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked = judge_url
    monkeypatch.setenv("JUDGES_KEY", "secret")
    options = {"url": url, "model": "wise", "key_env": "JUDGES_KEY"}
    assert await scored("judge", {"answer": "4"}, "rate: 5", "rate: 99", "rate: {answer}", options=options) == [0.5, 1.0, 0.3]
    assert {a["key"] for a in asked} == {"Bearer secret"} and {a["path"] for a in asked} == {"/v1/chat/completions"}
    assert {a["model"] for a in asked} == {"wise"}
    assert all("Right answer, if known:\n4" in a["messages"][0]["content"] for a in asked)
    settings = RewardSettings(reward=[RewardPart(function="judge", options=options)])
    assert "secret" not in settings.model_dump_json()


async def test_a_judge_that_is_busy_is_asked_again(judge_url: Asked) -> None:
    url, asked = judge_url
    options = {"url": url, "model": "wise"}
    assert await scored("judge", {}, "rate: busy", options=options) == [0.3] and len(asked) == 2


async def test_a_judge_that_is_away_costs_the_group() -> None:
    with pytest.raises(GroupUnscored, match=r"reward function judge: .*(does not answer|did not answer within)"):
        await scored("judge", {}, "x", options={"url": "http://127.0.0.1:9", "model": "wise"})


def test_a_judges_key_must_be_in_the_environment() -> None:
    with pytest.raises(UsageError, match="no variable SHOAL_NO_SUCH_KEY, which key_env names"):
        make_judge({"url": "http://x", "model": "wise", "key_env": "SHOAL_NO_SUCH_KEY"})
