"""Data of a user's own: rows to prompts, the order of rows, held-out rows, bad rows, tasks in code."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.config import TaskSection
from learner.data_digests import changed_data
from learner.evaluation.plan import EvalPlan
from learner.evaluation.problems import Evaluation
from learner.rewards.group_scorer import PooledScorer
from learner.rewards.port import Answer
from learner.rewards.settings import RewardSettings
from learner.tasks.data.order import BLOCK, Order, shuffled, slots
from learner.tasks.data.task import DataTask
from learner.tasks.port import ChatFormat, Prompt, Score, Task
from learner.tasks.prompting import cut, encode_prompt, fit_prompts, stop_tokens, unused_options
from learner.tasks.registry import open_task
from learner.tasks.settings import TaskSettings
from p2p.errors import UsageError


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(count)]


def jsonl(folder: Path, values: list[Any], name: str = "train.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(file)


def opened(data: Any, **settings: Any) -> Task:
    return open_task(TaskSettings.model_validate({"data": data, **settings}))


def texts(task: Task, count: int) -> list[str]:
    return [task.prompt(i).text for i in range(count)]


class CharacterTokenizer:
    """A token a character, and a chat template that writes roles and contents down."""

    chat_template = "{{ messages }} {{ enable_thinking }}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, turns: list[dict[str, Any]], **options: Any) -> str:
        if options.get("refuse") and turns[0]["role"] == "system":
            raise ValueError("System role not supported")
        thinking = "" if options.get("enable_thinking", True) else "<no thinking>"
        tools = json.dumps(options["tools"]) if "tools" in options else ""
        return tools + "".join(f"[{t['role']}]{t['content']}" for t in turns) + thinking


def read(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


# ---- order


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_a_shuffle_is_one_to_one(size: int) -> None:
    assert sorted(shuffled(i, size, (5, "epoch", 0)) for i in range(size)) == list(range(size))


def test_order_is_the_same_in_every_release() -> None:
    assert [Order(7, [10], [1.0]).place(i).row for i in range(20)] == [4, 9, 0, 7, 6, 8, 2, 5, 1, 3, 1, 8, 6, 0, 5, 4, 9, 3, 2, 7]


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    order = Order(0, [50], [1.0])
    first, second = ([order.place(50 * e + i).row for i in range(50)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert first != [Order(1, [50], [1.0]).place(i).row for i in range(50)]


def test_sources_have_their_shares_and_no_row_comes_twice_in_an_epoch() -> None:
    order = Order(3, [1500, 10], [3.0, 1.0])
    places = [order.place(i) for i in range(2 * BLOCK)]
    assert Counter(p.source for p in places) == {0: 1500, 1: 500}
    assert {p.row for p in places if p.source == 0} == set(range(1500))
    assert set(Counter(p.row for p in places if p.source == 1).values()) == {50}
    assert slots([1, 1, 1]) == (334, 333, 333)
    with pytest.raises(UsageError, match="less than a thousandth"):
        slots([1.0, 1e-9])


# ---- rows to prompts


def test_a_file_of_rows_is_a_task(tmp_path: Path) -> None:
    task = opened(jsonl(tmp_path, rows(200)))
    prompt = task.prompt(3)
    assert prompt.chat and not prompt.messages and prompt.entry["prompt"] == prompt.text
    number = int(prompt.where.rpartition("row ")[2])
    assert prompt.entry == rows(200)[number - 1]
    assert task.score(prompt, f" {prompt.entry['answer']}\n").exact and task.score(prompt, "no").reward == 0.0
    assert task.solution(prompt) == prompt.entry["answer"]
    again = opened(jsonl(tmp_path, rows(200)))
    assert [again.prompt(i) for i in reversed(range(50))] == [task.prompt(i) for i in reversed(range(50))]
    assert texts(task, 50) != texts(opened(jsonl(tmp_path, rows(200)), seed=1), 50)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_each_kind_of_file_has_the_same_problems(tmp_path: Path, ending: str) -> None:
    values = [{"prompt": f"line one\nand \"{i}\", two", "answer": str(i)} for i in range(40)]
    file = tmp_path / f"train.{ending}"
    if ending == "json":
        file.write_text(json.dumps(values))
    elif ending == "csv":
        quoted = "".join(f'"{v["prompt"].replace(chr(34), chr(34) * 2)}",{v["answer"]}\r\n' for v in values)
        file.write_text("prompt,answer\r\n" + quoted)
    else:
        jsonl(tmp_path, values)
    got = opened(str(file))
    assert texts(got, 40) == texts(opened(jsonl(tmp_path, values, "same.jsonl")), 40)
    assert got.prompt(0).where.startswith(f"{file}, row ")


def test_parquet_and_data_set_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows(60)), tmp_path / "train.parquet")
    datasets.Dataset.from_parquet(str(tmp_path / "train.parquet")).save_to_disk(str(tmp_path / "folder"))
    wanted = texts(opened(jsonl(tmp_path, rows(60))), 60)
    assert texts(opened(str(tmp_path / "train.parquet")), 60) == wanted
    assert texts(opened(str(tmp_path / "folder")), 60) == wanted
    assert texts(opened([{"dataset": str(tmp_path / "folder"), "split": "train"}]), 60) == wanted
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(UsageError, match=r"bad\.parquet cannot be read"):
        opened(str(tmp_path / "bad.parquet"))
    with pytest.raises(UsageError, match="cannot be loaded"):
        opened([{"dataset": str(tmp_path / "nothing")}])


def test_templates_messages_system_prompt_and_examples(tmp_path: Path) -> None:
    data = jsonl(tmp_path, [{"a": 1, "b": 2.5, "answer": "3.5", "chat": [{"role": "user", "content": "hi"}]}])
    common: dict[str, Any] = {"held_out": 0.0, "system_prompt": "Be brief.", "few_shot": [{"prompt": "0+0", "answer": "0"}]}
    task = opened(data, template="{{{a}}} + {b} =", template_options={"enable_thinking": False}, **common)
    lead = "[system]Be brief.[user]0+0[assistant]0"
    text = read(encode_prompt(CharacterTokenizer(), task.prompt(0), task.chat_format))
    assert text == f"{lead}[user]{{1}} + 2.5 =<no thinking>"
    for settings in ({"messages": "chat"}, {"prompt": "chat"}):
        assert read(encode_prompt(CharacterTokenizer(), opened(data, **settings, **common).prompt(0))) == f"{lead}[user]hi"
    bare = opened(data, template="{a}+{b}=", chat=False, **common).prompt(0)
    assert not bare.chat and bare.text == "Be brief.\n\n0+00\n\n1+2.5="


def test_a_rows_own_system_message_stays_the_only_one(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"}]
    task = opened(jsonl(tmp_path, [{"prompt": chat, "answer": "x"}]), system_prompt="Ours.", held_out=0.0)
    assert [m["content"] for m in task.prompt(0).messages] == ["Mine.", "hi"]


def test_other_tasks_have_a_system_prompt_too() -> None:
    settings = TaskSettings(
        name="reasoning_gym:chain_sum", options={"size": 20}, system_prompt="Answer in <answer> tags.", stop=["</answer>"],
        template_options={"enable_thinking": False},
    )  # fmt: skip
    task = open_task(settings)
    prompt = task.prompt(0)
    assert [m["role"] for m in prompt.messages] == ["system", "user"] and prompt.messages[1]["content"] == prompt.text
    assert task.chat_format.options == {"enable_thinking": False} and task.stop == ("</answer>",)
    assert task.confined is not None and task.score(prompt, f"<answer>{task.solution(prompt)}</answer>").exact
    with pytest.raises(UsageError, match="go with chat prompts"):
        open_task(TaskSettings(system_prompt="x"))


def test_a_template_that_refuses_is_one_line_with_the_row() -> None:
    prompt = Prompt(0, "hi", None, True, messages=({"role": "system", "content": "s"},), where="train.jsonl, row 4")
    with pytest.raises(UsageError, match=r"train\.jsonl, row 4: .*System role not supported; .*empty task\.system_prompt"):
        encode_prompt(CharacterTokenizer(), prompt, ChatFormat({"refuse": True}))
    assert unused_options(CharacterTokenizer(), ChatFormat({"enable_thinking": False, "thinkin": 1})) == ("thinkin",)


def test_strings_that_end_a_completion() -> None:
    assert cut("12 END 34 STOP", ("STOP", " END")) == "12" and cut("12", ("x",)) == "12" and cut("12", ()) == "12"
    assert stop_tokens(CharacterTokenizer(), ("END", "#", ";")) == (ord("#"), ord(";"))


# ---- held-out rows


def test_no_row_changes_sides_when_the_file_grows(tmp_path: Path) -> None:
    sides: list[dict[str, bool]] = []
    for count in (300, 1000):
        task = opened(jsonl(tmp_path, rows(count)), held_out=0.1)
        held = task.held_out_count
        assert held is not None and 0.05 * count < held < 0.16 * count
        side = {task.held_out(i).text: True for i in range(held)} | {task.prompt(i).text: False for i in range(count - held)}
        assert len(side) == count and task.held_out(0).held_out and not task.prompt(0).held_out
        sides.append(side)
    assert all(sides[1][text] is held for text, held in sides[0].items())


def test_equal_prompts_are_on_one_side_and_none_held_out_is_said(tmp_path: Path) -> None:
    values = [{"prompt": f"q{i // 4}", "answer": str(i)} for i in range(400)]
    task = opened(jsonl(tmp_path, values), held_out=0.3)
    held = task.held_out_count
    assert held
    assert not {task.held_out(i).text for i in range(held)} & set(texts(task, 400 - held))
    none = opened(jsonl(tmp_path, rows(5)), held_out=0.0)
    assert none.held_out_count == 0
    with pytest.raises(UsageError, match="no row is held out"):
        none.held_out(0)


# ---- bad rows


@pytest.mark.parametrize(
    ("line", "settings", "match"),
    [
        ("{oops", {}, r"row 2: is not JSON"),
        ("[1]", {}, r"row 2: is no table of columns but a list"),
        ('{"question": "x", "answer": "1"}', {}, r'row 2: column "prompt" is missing \(it has: question, answer\)'),
        ('{"prompt": " ", "answer": "1"}', {}, r'row 2: column "prompt" is empty'),
        ('{"prompt": null, "answer": "1"}', {}, r'row 2: column "prompt" is null'),
        ('{"prompt": 3, "answer": "1"}', {}, r'row 2: column "prompt" is a int, neither'),
        ('{"prompt": "x"}', {}, r'row 2: column "answer" is missing: set task.answer'),
        ('{"prompt": [], "answer": "1"}', {}, r'row 2: column "prompt" is empty'),
        ('{"prompt": [{"role": "me", "content": "x"}], "answer": "1"}', {}, r"message 1: its role is none of system"),
        ('{"prompt": [{"role": "user", "content": 3}], "answer": "1"}', {}, r"message 1: its content is no text"),
        ('{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}', {}, r"the last message is the assistant's"),
        ('{"prompt": [{"role": "user", "content": "x"}], "answer": "1"}', {"chat": False}, r"task\.chat = false"),
        ('{"prompt": "x", "answer": "1", "q": []}', {"template": "{q}"}, r'column "q" is'),
        ('{"prompt": "x", "answer": "1"}', {"template": "{other}"}, r'column "other" is missing'),
    ],
)
def test_a_bad_row_is_one_line_with_file_row_and_column(
    tmp_path: Path, line: str, settings: dict[str, Any], match: str
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "a", "answer": "1", "q": "b", "other": "c"}\n' + line + "\n")
    with pytest.raises(UsageError, match=match) as caught:
        opened(str(file), held_out=0.0, **settings)
    assert str(file) in str(caught.value) and 'task.bad_rows = "skip"' in str(caught.value)
    assert all("\n" not in problem for problem in caught.value.problems)


def test_bad_rows_are_skipped_and_counted_where_that_is_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = rows(20)
    file = Path(jsonl(tmp_path, good))
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:10], "", "{oops", *lines[10:], '{"prompt": ""}']))  # no line end at the end
    task = opened(str(file), bad_rows="skip", held_out=0.0)
    assert sorted(texts(task, 20)) == sorted(row["prompt"] for row in good)
    assert "2 of 22 rows" in caplog.text and "row 12: is not JSON" in caplog.text
    same = opened(jsonl(tmp_path, good, "good.jsonl"), held_out=0.0)
    assert texts(same, 20) == texts(task, 20)


def test_equal_faults_are_told_once_with_their_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "train.jsonl"
    faults = ['{"prompt": ""}'] * 7 + ["{oops", '{"x": 1', '{"prompt": "a"}', '{"q": "a"}', '{"q": "a", "r": 1}', "3"]
    more = ['{"prompt": 3}', '{"prompt": 4}', '{"prompt": null}']
    file.write_text("\n".join([*(json.dumps(row) for row in rows(20)), *faults, *more]))
    with pytest.raises(UsageError) as caught:
        opened(str(file))
    where = f"task.data: {file}, row"
    said = caught.value.problems
    assert said[0] == f'{where} 21: column "prompt" is empty (and 6 more such rows)'
    assert said[1].startswith(f"{where} 28: is not JSON: ") and said[1].endswith(" (and 1 more such row)")
    assert said[2].startswith(f'{where} 30: column "answer" is missing: ')
    assert said[3] == f'{where} 31: column "prompt" is missing (it has: q) (and 1 more such row)'
    assert said[4] == f"{where} 33: is no table of columns but a number"
    assert said[5:6] == ("task.data: and 3 rows for other reasons",)
    assert len(said) == 7 and said[6].startswith(f"task.data: {file}: 16 of 36 rows are bad: mend them, or leave")


def test_rows_without_a_column_that_a_reward_function_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = [{"prompt": f"{i}", "right": "1"} for i in range(10)]
    for i in (3, 7):
        values[i] = {"prompt": f"{i}", "wrong": "1"}
    data = jsonl(tmp_path, values)
    code = tmp_path / "rewards.py"
    code.write_text("def score(completion, right):\n    return 1.0\n")
    parts = RewardSettings.model_validate({"reward": f"{code}:score"})

    def scorer(**settings: Any) -> PooledScorer:
        made = TaskSettings.model_validate({"data": data, "held_out": 0.0, **settings})
        return PooledScorer(open_task(made, own_score=False), parts)

    with pytest.raises(UsageError) as caught, scorer():
        pass
    first = f'column "right" is missing, which {code}:score needs (it has: prompt, wrong) (and 1 more such row)'
    assert caught.value.problems[0] == f"task.data: {data}, row 4: {first}"
    assert "2 of 10 rows are bad" in caught.value.problems[1]
    with scorer(bad_rows="skip") as one:
        assert sorted(one.task.prompt(i).text for i in range(8)) == list("01245689") and f"row 4: {first}" in caplog.text
        with PooledScorer(one.task, parts):  # an evaluation's: what is left out is told once
            assert caplog.text.count("left out") == 1


def test_prompts_longer_than_the_model_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = jsonl(tmp_path, [*rows(10), {"prompt": "x" * 3000, "answer": "1"}])
    with pytest.raises(UsageError, match=r"row 11: its prompt has 3006 tokens, and the model takes 2047"):
        fit_prompts(opened(data, held_out=0.0), CharacterTokenizer(), 2048)
    task = opened(data, held_out=0.0, bad_rows="skip")
    fit_prompts(task, CharacterTokenizer(), 2048)
    assert sorted(texts(task, 10)) == sorted(row["prompt"] for row in rows(10)) and "1 of 11 rows" in caplog.text
    fit_prompts(opened(data), CharacterTokenizer(), 0)  # not known


def test_prompts_that_are_too_long_with_an_environments_tools(tmp_path: Path) -> None:
    task = opened(jsonl(tmp_path, [{"prompt": "x" * n, "answer": "1"} for n in (10, 20, 600)]), held_out=0.0, bad_rows="skip")
    fit_prompts(task, CharacterTokenizer(), 4000)
    assert task.held_out_count == 0 and len({task.prompt(i).text for i in range(3)}) == 3
    tool = {"type": "function", "function": {"name": "look", "description": "y" * 3400}}
    task.chat_format = replace(task.chat_format, tools=(tool,))  # as `running_environment` does
    fit_prompts(task, CharacterTokenizer(), 4000)
    assert {task.prompt(i).text for i in range(3)} == {"x" * 10, "x" * 20}


@pytest.mark.parametrize(
    ("data", "settings", "match"),
    [
        ("nowhere.jsonl", {}, "no such file: nowhere.jsonl"),
        ([{"path": "train.txt"}], {}, r"a file of data ends in \.jsonl"),
        ("", {"name": "data"}, "needs task.data"),
        ("empty.jsonl", {}, "has no rows"),
        ("one.jsonl", {"template": "no column"}, r"names no \{column\}"),
        ("one.jsonl", {"template": "\\boxed{} {q}"}, r"is no column's name; a brace itself is written \{\{"),
        ("one.jsonl", {"template": "{q"}, "a brace itself is written"),
        ("one.jsonl", {"name": "reverse"}, "task.data goes with the task data"),
        ("list.json", {}, "is to be a JSON list of rows, not a number"),
        ("broken.json", {}, r"is not JSON: .*name it \.jsonl"),
        ("twice.csv", {}, "is to name the columns, each once"),
        ("short.csv", {}, "row 2: has 1 fields, and there are 2 columns"),
    ],
)
def test_what_is_no_data_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, settings: dict[str, Any], match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("empty.jsonl", "\n"), ("one.jsonl", '{"prompt": "a", "answer": "b"}\n'), ("list.json", "3"),
                       ("broken.json", "{}\n{}"), ("twice.csv", "a,a\n1,2\n"), ("short.csv", "prompt,answer\nx\n")):  # fmt: skip
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=match):
        opened(data, **settings)


def test_a_changed_file_is_told_when_a_run_is_resumed(tmp_path: Path) -> None:
    first = opened(jsonl(tmp_path, rows(20)))
    assert changed_data(tmp_path, first, resume=False) == [] == changed_data(tmp_path, first, resume=True)
    second = opened(jsonl(tmp_path, rows(21)))
    (line,) = changed_data(tmp_path, second, resume=True)
    assert "train.jsonl has changed since this run began" in line
    assert changed_data(tmp_path, second, resume=True) == []
    (tmp_path / "data.json").write_text(json.dumps(dict(first.fingerprint)))  # as a learner of before wrote it
    (line,) = changed_data(tmp_path, second, resume=True)
    assert "train.jsonl has changed since this run began" in line


def test_a_changed_file_of_an_evaluation_is_told_by_its_name(tmp_path: Path) -> None:
    train = opened(jsonl(tmp_path, rows(20)), held_out=0.0)

    def evaluations(count: int) -> list[Evaluation]:
        files = {"mine": jsonl(tmp_path, rows(count), "mine.jsonl"), "same": jsonl(tmp_path, rows(9), "same.jsonl")}
        tasks = {name: opened(file, held_out=0.0) for name, file in files.items()}
        return [Evaluation(eval_plan(name), (), (), str, unscored, task.fingerprint)
                for name, task in (*tasks.items(), ("of-the-run", train))]  # fmt: skip

    assert changed_data(tmp_path, train, evaluations(9), resume=False) == []
    assert changed_data(tmp_path, train, evaluations(9), resume=True) == []
    (line,) = changed_data(tmp_path, train, evaluations(8), resume=True)
    assert line.startswith("eval mine: ") and "mine.jsonl has changed since this run began: figures" in line
    assert changed_data(tmp_path, train, evaluations(8)[1:], resume=True) == []  # an evaluation less is no change of data
    assert set(json.loads((tmp_path / "data.json").read_text())["eval"]) == {"same"}


def eval_plan(name: str) -> EvalPlan:
    return EvalPlan(
        name=name, prompts=4, samples=1, every=0, at_start=True, at_end=True, temperature=0.0, top_p=1.0, max_new_tokens=8,
        stop_ids=(0,), seed=0,
    )  # fmt: skip


async def unscored(prompt: Prompt, answers: Sequence[Answer]) -> Sequence[Score]:
    raise NotImplementedError


# ---- tasks in code

CODE = """
from learner.tasks.port import Prompt, Score, Task
from helper import GREETING

class Greet(Task):
    name = "greet"
    def __init__(self, seed, loud=False):
        if loud == "very":
            raise RuntimeError("too loud")
        self.loud = loud
    def prompt(self, index):
        if index == 7:
            raise KeyError("seven")
        return Prompt(index, GREETING, None, True)
    held_out = prompt
    def score(self, prompt, completion):
        return Score(1.0, True)

class NotATask:
    pass
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("GREETING = 'hello'\n")
    file = tmp_path / "greet.py"
    file.write_text(CODE)
    return file


def test_a_class_of_ones_own_comes_through_the_same_door(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = open_task(TaskSettings(name=f"{code}:Greet", options={"loud": True}, system_prompt="Greet."))
    assert task.name == "greet" and task.loud  # type: ignore[attr-defined]
    assert [m["content"] for m in task.prompt(0).messages] == ["Greet.", "hello"]
    with pytest.raises(UsageError, match=r"task greet: problem 7: KeyError: 'seven' \(.*greet\.py, line \d+\)"):
        task.prompt(7)
    monkeypatch.chdir(code.parent)
    rooted = TaskSettings.model_validate(TaskSettings(name="greet.py:Greet").rooted())
    assert rooted.name == f"{code}:Greet"
    built_in = open_task(TaskSettings(name="learner.tasks.letters_and_sums:AddTask", options={"digits": 3}))
    assert built_in.prompt(5).text == open_task(TaskSettings(name="add", options={"digits": 3})).prompt(5).text


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("nowhere.py:Greet", {}, "no such file"),
        ("{code}:Gret", {}, "has no 'Gret'; did you mean"),
        ("{code}:NotATask", {}, "is no subclass of learner.tasks.port.Task"),
        ("{code}:Greet", {"loud": "very"}, r"RuntimeError: too loud \(.*greet\.py, line \d+\)"),
        ("{code}:Greet", {"quiet": 1}, "unexpected keyword argument 'quiet'"),
        ("no_such_module:Greet", {}, "no module 'no_such_module' is installed"),
        ("json:dumps", {}, "is no subclass"),
        ("{broken}:Greet", {}, r"cannot be imported: SyntaxError: .*line 2"),
        ("{raises}:Greet", {}, r"cannot be imported: ZeroDivisionError: .*raises\.py, line 1\)"),
    ],
)
def test_what_is_wrong_with_a_users_code_is_one_line(
    code: Path, tmp_path: Path, name: str, options: dict[str, Any], match: str
) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef :\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    text = name.format(code=code, broken=tmp_path / "broken.py", raises=tmp_path / "raises.py")
    with pytest.raises(UsageError, match=match) as caught:
        open_task(TaskSettings(name=text, options=options))
    assert "\n" not in str(caught.value)


async def test_the_pages_examples_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    docs = Path(__file__).parents[2] / "docs"
    start = (docs / "quickstart.md").read_text().partition("### Your own data")[2].split("\n")
    (tmp_path / "train.jsonl").write_text("\n".join(line for line in start if line.startswith('    {"prompt"')))
    toml = "\n".join(start).partition("    [task]")[2].partition("\n\n")[0]
    code = "\n".join(start).partition("    def score")[2].partition("\n\n")[0]
    (tmp_path / "rewards.py").write_text(textwrap.dedent(f"    def score{code}\n"))
    settings = TaskSection.model_validate(tomllib.loads("\n".join(line.strip() for line in toml.split("\n"))))
    task = open_task(settings, own_score=False)
    prompt = task.prompt(0)
    assert prompt.messages[0]["content"] == "You are good at sums."
    right = prompt.entry["answer"]
    with PooledScorer(task, settings) as scorer:
        scores = await scorer.score_prompt(prompt, [Answer(text, "node") for text in (right, f"It is {right}.", "no idea")])
    assert [score.reward for score in scores] == [1.0, 0.5, 0.0]
    own = (docs / "own-data.md").read_text()
    code = own[own.index("    import random") : own.index("The docstrings of `learner/tasks/port.py`")]
    (tmp_path / "greet.py").write_text(textwrap.dedent(code))
    greet = open_task(TaskSettings(name="greet.py:Greet", options={"names": ["Ada"]}))
    assert greet.prompt(0).text == "Greet Ada." and greet.score(greet.prompt(0), "Hello Ada").exact


def test_a_data_task_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from learner.tasks.data.task import DataTask\nfrom learner.tasks.port import Score\n\n"
        "class Mine(DataTask):\n    def score(self, prompt, completion):\n"
        "        return Score(-abs(len(completion) - int(prompt.entry['length'])), False)\n"
    )
    data = jsonl(tmp_path, [{"prompt": "Write.", "length": 3, "answer": ""}])
    task = opened(data, name=f"{tmp_path / 'mine.py'}:Mine", held_out=0.0)
    assert isinstance(task.inner, DataTask)  # type: ignore[attr-defined]
    assert task.score(task.prompt(0), "12345").reward == -2
