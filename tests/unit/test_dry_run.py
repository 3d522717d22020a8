"""`shoal learner run.toml --dry-run` as a person meets it: every fault in one go, one line each, and where it was read."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import shoal
from learner.config import load_config
from learner.journal.journal import Journal
from learner.preflight import devices
from learner.preflight.gather import count_parameters, gather
from learner.rewards.sandbox_probe import missing_layers
from p2p.channel.libp2p import check_dialable
from p2p.errors import UsageError
from p2p.identity import Identity

Run = pytest.CaptureFixture[str]


def dry_run(capsys: Run, *argv: object) -> tuple[int, str, list[str]]:
    """Exit status, stdout, and the lines of stderr."""
    capsys.readouterr()
    try:
        status = shoal.main(["learner", *map(str, argv), "--dry-run"])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    out, err = capsys.readouterr()
    return status, out, err.splitlines()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with 1,000 weights and a tokenizer of the letters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 40, "max_position_embeddings": 64}')
    save_file({"a": np.zeros((30, 30), np.float32), "b": np.zeros(100, np.float16)}, folder / "model.safetensors")
    words = {c: i for i, c in enumerate(["<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789 =+:>"])}
    tokenizer = Tokenizer(WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        yield


def config_file(folder: Path, model: object, more: str = "", rollout: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(f'run_dir = "{folder}/runs/first"\nmodel = "{model}"\n{more}\n[rollout]\nmax_new_tokens = 16\n{rollout}\n')
    return path


@pytest.mark.usefixtures("full_disk")
def test_a_faulty_file_brings_all_its_faults_at_once(tmp_path: Path, capsys: Run) -> None:
    """A misspelt key, a wrong type, a model that is not there, no room on the disk, one sample a group."""
    path = config_file(tmp_path, tmp_path / "nowhere", rollout='stal_s = 60.0\ntemperature = "hot"\nsamples = 1')
    status, out, lines = dry_run(capsys, path)
    assert status == 2 and out == "" and len(lines) == 5, lines
    for line, words in zip(
        lines,
        (
            ("run.toml", "rollout.temperature", "number", "'hot'"),
            ("run.toml", "rollout.stal_s", "unknown key", "did you mean rollout.stall_s?"),
            ("nowhere", "model folder"),
            ("rollout.samples = 1", "at least 2"),
            ("run_dir", str(tmp_path), "0.977 KiB free"),
        ),
        strict=True,
    ):
        assert line.startswith("shoal: ") and all(word in line for word in words), line
    assert not (tmp_path / "runs").exists()


def test_required_keys_that_are_not_there(tmp_path: Path, capsys: Run) -> None:
    (tmp_path / "run.toml").write_text("[rollout]\nsamples = 1\n")
    status, _, lines = dry_run(capsys, tmp_path / "run.toml")
    assert status == 2 and len(lines) == 3
    assert "run.toml: run_dir is required" in lines[0] and "run.toml: model is required" in lines[1] and "samples" in lines[2]


def test_faults_of_the_world(tmp_path: Path, model: Path, capsys: Run) -> None:
    (tmp_path / "runs").write_text("a file in the way")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        more = f'[status]\nport = {port}\n[task]\nname = "revers"\n'
        more += f'[swarm]\nlisten = ["/ip4/127.0.0.1/tcp/{port}", "localhost:80"]\n'
        status, _, lines = dry_run(capsys, config_file(tmp_path, model, more))
    assert status == 2
    said = "\n".join(lines)
    for word in ("did you mean 'reverse'?", "is not a directory", f"port {port} is in use", "'localhost:80'"):
        assert word in said
    assert f"status port {port}" in said and f"status.port = {port} is also a port of swarm.listen" in said
    assert len(lines) == 6, lines


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[local_engine]\nengine = "fake"\nengine_python = "/no/python"', ("local_engine.engine_python", "/no/python")),
        ('[swarm]\nannounce = ["203.0.113.7:4001"]', ("swarm.announce", "'203.0.113.7:4001'", "want /ip4/ADDRESS")),
        ('[swarm]\nannounce = ["/ip4/203.0.113.7/udp/4001"]', ("swarm.announce", "/udp/")),
        ('[swarm]\nannounce = ["/ip4/203.0.113.7/tcp/0"]', ("swarm.announce", "cannot be dialled")),
        ('[swarm]\nlisten = ["/ip4/127.0.0.1/tcp/PORT"]\n[status]\nport = PORT', ("status.port", "swarm.listen")),
        ('[swarm]\nlisten = ["/ip4/127.0.0.1/tcp/PORT", "/ip4/127.0.0.1/tcp/PORT"]', ("swarm.listen", "twice")),
    ],
)
def test_what_would_only_fail_later(tmp_path: Path, model: Path, capsys: Run, more: str, words: tuple[str, ...]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    status, _, lines = dry_run(capsys, config_file(tmp_path, model, more.replace("PORT", str(port))))
    assert status == 2 and len(lines) == 1 and all(word in lines[0] for word in words), lines


def test_an_environment_of_ones_own_needs_no_answers_and_is_looked_for(tmp_path: Path, model: Path, capsys: Run) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "go {i}"}}\n' for i in range(40)))
    code = "from learner.environments.environment import Environment\n\nclass Game(Environment):\n"
    code += "    def __init__(self, size=1):\n        self.size = size\n"
    (tmp_path / "game.py").write_text(code)
    more = f'[task]\ndata = "{tmp_path / "rows.jsonl"}"\nchat = false\n[environment]\nname = "{tmp_path / "game.py"}:Game"'
    path = config_file(tmp_path, model, more)
    status, _, said = dry_run(capsys, path)
    assert status == 0 and any("Game has no respond, no reward and no tools" in line for line in said)
    status, _, said = dry_run(capsys, path, "--environment.name", f"{tmp_path / 'game.py'}:Gone")
    assert status == 2 and len(said) == 1 and "has no 'Gone'" in said[0]
    status, _, said = dry_run(capsys, path, "--environment.options.nope", "1")
    assert status == 2 and len(said) == 1 and "cannot be made" in said[0] and "nope" in said[0]
    status, _, said = dry_run(capsys, path, "--task.reward", "exact")
    assert status == 2 and len(said) == 1 and "leave one of them out" in said[0]


def test_columns_that_a_reward_function_needs_are_looked_for(tmp_path: Path, model: Path, capsys: Run) -> None:
    data, code = tmp_path / "rows.jsonl", tmp_path / "rewards.py"
    data.write_text("".join(f'{{"prompt": "go {i}", "solution": "{i}"}}\n' for i in range(40)))
    code.write_text("def score(prompts, completions, answer, **columns):\n    return [0.0 for _ in completions]\n")
    path = config_file(tmp_path, model, f'[task]\ndata = "{data}"\nchat = false\nreward = "{code}:score"')
    status, _, said = dry_run(capsys, path)
    line = f'task.data: {data}, row 1: column "answer" is missing, which {code}:score needs (it has: prompt, solution)'
    assert status == 2 and len(said) == 2 and f"{line} (and 39 more such rows)" in said[0] and "40 of 40 rows" in said[1]
    assert dry_run(capsys, path, "--task.reward", f"{code}:gone")[0] == 2
    code.write_text("def score(prompts, completions, solution, **columns):\n    return [0.0 for _ in completions]\n")
    assert dry_run(capsys, path)[0] == 0


def test_evaluations_are_opened(tmp_path: Path, model: Path, capsys: Run) -> None:
    data = tmp_path / "held.jsonl"
    data.write_text("".join(f'{{"prompt": "go {i}", "answer": "{i}"}}\n' for i in range(4)))

    def dry(task: str) -> tuple[int, list[str]]:
        more = f'[[eval]]\nname = "mine"\n[eval.task]\nchat = false\n{task}'
        status, _, said = dry_run(capsys, config_file(tmp_path, model, f'[task]\nname = "reverse"\n{more}'))
        return status, said

    assert dry(f'data = "{data}"')[0] == 0
    for task, words in (
        (f'data = "{data}x.jsonl"', "eval mine: task.data: no such file"),
        (f'data = "{data}"\nprompt = "question"', 'row 1: column "question" is missing (it has: prompt, answer) (and 3 more'),
        (f'data = "{data}"\nreward = "boxed"\nanswer = "a"\n', ""),
        (f'data = "{data}"\n[[eval.task.reward]]\nfunction = "boxed"\noptions = {{ column = "a" }}', "which boxed needs"),
        ('name = "revers"', "eval mine: unknown task 'revers'"),
    ):
        status, said = dry(task)
        assert status == 2 * bool(words) and (not words or (words in said[0] and said[0].startswith("shoal: eval mine: "))), said


def test_stop_strings_that_no_text_holds_are_refused(tmp_path: Path, model: Path, capsys: Run) -> None:
    """A special token among several tokens: it has no text. Alone it is a token that ends a completion."""
    task, more = '[task]\nname = "reverse"\n', '[[eval]]\nname = "mine"\n[eval.task]\nname = "reverse"\nstop = ["<eos><eos>"]'
    status, _, said = dry_run(capsys, config_file(tmp_path, model, f'{task}stop = ["e<eos>", "<eos>", "e"]\n{more}'))
    assert status == 2 and len(said) == 2, said
    assert "task.stop: 'e<eos>' would never be found" in said[0] and "is 'e'" in said[0]
    assert "eval mine: task.stop: '<eos><eos>'" in said[1]
    assert dry_run(capsys, config_file(tmp_path, model, f'{task}stop = ["<eos>", "e"]'))[0] == 0


def test_evaluations_in_environments_are_opened_as_at_the_start(tmp_path: Path, model: Path, capsys: Run) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def score(prompts, completions, answer, **columns):\n    return [0.0 for _ in completions]\n")

    def dry(keys: str, task: str, more: str = "") -> tuple[int, list[str]]:
        tables = f'[task]\nname = "reverse"\n{more}\n[[eval]]\nname = "mine"\n{keys}\n[eval.task]\n{task}'
        status, _, said = dry_run(capsys, config_file(tmp_path, model, tables))
        return status, said

    assert dry("", 'name = "guess_number"')[0] == 0
    status, said = dry("", f'name = "guess_number"\nreward = "{rewards}:score"')
    assert (status, said[0]) == (
        2, "shoal: eval mine: an environment rewards its episodes itself; leave the reward functions out",
    ), said  # fmt: skip
    game = '[environment]\nname = "learner.environments.guess_number:GuessNumber"\noptions = {numbers = 9, guesses = 3}'
    status, said = dry("environment = true", 'name = "guess_number"', game)
    assert status == 2 and "eval mine: environment.name = " in said[0] and "has an environment of its own" in said[0]


@pytest.mark.parametrize(
    "where",
    ["process", pytest.param("sandbox", marks=pytest.mark.skipif(bool(missing_layers()), reason="nothing is confined here"))],
)
def test_an_environments_code_does_not_run_in_our_process(tmp_path: Path, model: Path, capsys: Run, where: str) -> None:
    """And it may print more than a pipe holds."""
    file, rows = tmp_path / "game.py", tmp_path / "rows.jsonl"
    file.write_text(
        "import os\nfrom learner.environments.environment import Environment\nprint(9999 * 'no news\\n')\n"
        "class Game(Environment):\n    def __init__(self):\n        raise RuntimeError(f'made by {os.getpid()}')\n"
    )
    rows.write_text("".join(f'{{"prompt": "go {i}"}}\n' for i in range(40)))
    task = f'data = "{rows}"\nchat = false\n'
    more = f'[environment]\nname = "{file}:Game"\nrun = "{where}"\n[task]\n{task}'
    more += f'[[eval]]\nname = "mine"\nenvironment = true\n[eval.task]\n{task}'
    status, _, said = dry_run(capsys, config_file(tmp_path, model, more))
    assert status == 2 and len(said) == 1, "the evaluation's is the same, and told once"
    assert "RuntimeError: made by " in said[0] and f"made by {os.getpid()}" not in said[0]


def test_addresses_that_a_ticket_may_name() -> None:
    peer = Identity.generate().peer_id
    check_dialable(["/ip4/203.0.113.7/tcp/4001", f"/dns4/a.example/tcp/1/p2p/{peer}", "/ip6/::1/tcp/1", "/dns/a.example/tcp/1"])


def test_links_to_other_disks(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(config_file(tmp_path, model))
    run_dir, other = Path(config.run_dir), tmp_path / "other"
    run_dir.mkdir(parents=True)
    (run_dir / "checkpoints").symlink_to(other)
    assert "is a link to" in gather(config, thorough=False).tried[0].what
    other.mkdir()
    (room,) = gather(config, thorough=False).rooms
    assert set(room.parts) == {"checkpoints", "versions", "journal"}, "it is the same disk"
    stat = Path.stat

    def on_another(path: Path, **more: Any) -> Any:
        found = stat(path, **more)
        return SimpleNamespace(st_dev=-1, st_mode=found.st_mode) if path == other else found

    monkeypatch.setattr(Path, "stat", on_another)
    found = {room.folder: room.parts for room in gather(config, thorough=False).rooms}
    assert found == {str(run_dir): ("versions", "journal"), str(other): ("checkpoints",)}


def test_a_sound_file_is_printed_resolved_and_leaves_nothing(tmp_path: Path, model: Path, capsys: Run) -> None:
    path = config_file(tmp_path, model)
    before = sorted(tmp_path.rglob("*"))
    status, out, lines = dry_run(capsys, path)
    assert status == 0, lines
    (tmp_path / "again.toml").write_text(out)
    assert load_config(tmp_path / "again.toml") == load_config(path)
    (tmp_path / "again.toml").unlink()
    assert sorted(tmp_path.rglob("*")) == before
    noted = [line.startswith("note: ") for line in lines]
    assert noted == sorted(noted, reverse=True) and any(noted), "notes, then what it takes"
    assert any("memory: at least" in line for line in lines) and lines[sum(noted)].startswith("memory: ")
    assert "in total" in lines[-1]
    status, out, _ = dry_run(capsys, path, "--json")
    told = json.loads(out)
    assert status == 0 and told["ok"] and told["config"]["rollout"]["max_new_tokens"] == 16 and told["notes"]


def test_a_model_that_would_be_downloaded(tmp_path: Path, capsys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config_file(tmp_path, "some-owner/some-model")
    status, _, lines = dry_run(capsys, path)
    assert status == 0 and "downloaded" in lines[0] and "some-owner/some-model" in lines[0]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, _, lines = dry_run(capsys, path)
    assert status == 2 and "HF_HUB_OFFLINE" in lines[0]


def test_wrong_flags_are_not_blamed_on_the_file(tmp_path: Path, model: Path, capsys: Run) -> None:
    path = config_file(tmp_path, model)
    for flags, words in (
        (("--trainer.lrr", "3"), ("--trainer.lrr: no such setting", "did you mean --trainer.lr?")),
        (("--trainer.lr", "fast"), ("--trainer.lr: ", "'fast'")),
        (("--dryrun",), ("--dryrun: no such setting", "did you mean --dry-run?")),
        (("--sede", "3"), ("did you mean --seed?",)),
        (("--preset", "dappo"), ("--preset: ", "did you mean 'dapo'?")),
        (("--model", "/nowhere"), ("no model folder /nowhere",)),
    ):
        status, _, lines = dry_run(capsys, path, *flags)
        assert status == 2 and len(lines) == 1 and "run.toml" not in lines[0], lines
        assert all(word in lines[0] for word in words), lines
    status, _, (line,) = dry_run(capsys, "--dryrun", path)
    assert status == 2 and "--dry-run?" in line, "the file is not taken for the flag's value"


def test_both_are_named_when_both_are_wrong(tmp_path: Path, model: Path, capsys: Run) -> None:
    path = config_file(tmp_path, model, rollout="samples = 'many'\nsampels = 3")
    status, _, lines = dry_run(capsys, path, "--rollout.samples", "few", "--rollout.sampels", "4")
    assert status == 2
    assert len(lines) == 4, lines
    for place in ("run.toml: rollout.samples: ", "--rollout.samples: ", "run.toml: rollout.sampels: ", "--rollout.sampels: "):
        assert sum(place in line for line in lines) == 1
    path = config_file(tmp_path, model, rollout="samples = 'many'")
    assert dry_run(capsys, path, "--rollout.samples", "4")[0] == 0, "the flag wins"


def test_the_model_is_read_without_torch(model: Path, tmp_path: Path) -> None:
    assert count_parameters(model) == 1000
    facts = gather(load_config(config_file(tmp_path, model)))
    assert facts.tried == () and facts.model is not None and facts.host is not None
    assert (facts.model.parameters, facts.model.vocabulary, facts.model.context) == (1000, 40, 64)
    assert 0 < facts.model.longest_prompt < 64 and facts.host.total > 0 and facts.rooms[0].free > 0
    (model / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UsageError, match="cannot be read"):
        count_parameters(model)
    (model / "model.safetensors").unlink()
    assert count_parameters(model) == 0
    (line,) = [fault.what for fault in gather(load_config(config_file(tmp_path, model))).tried]
    assert "no *.safetensors" in line
    external = config_file(tmp_path, model, "external_trainer = true")
    assert gather(load_config(external)).tried == (), "another trainer has its weights elsewhere"


@pytest.mark.parametrize(
    ("config", "same", "counted"),
    [
        ({"tie_word_embeddings": True}, True, 30), ({"text_config": {"tie_word_embeddings": True}}, True, 30),
        ({"tie_word_embeddings": False}, True, 50), ({}, True, 30), ({}, False, 50),
    ],
)  # fmt: skip
def test_tied_weights_that_are_stored_twice_count_once(
    tmp_path: Path, config: dict[str, object], same: bool, counted: int
) -> None:
    """Where config.json does not say, the architecture decides, and the values tell."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    embedding = np.arange(20, dtype=np.float16).reshape(5, 4)
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding if same else embedding[::-1].copy()}
    save_file({**weights, "model.norm.weight": np.zeros(10, np.float32)}, tmp_path / "model.safetensors")
    assert count_parameters(tmp_path) == counted


def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "GPU_FILES", ("/",))
    found = devices.ask_torch()
    assert found.error == "" and all(gpu is not None and gpu.total >= gpu.free > 0 for gpu in found.gpus)
    monkeypatch.setattr(devices, "python_command", lambda module: ["/bin/false"])
    assert "cannot be asked" in devices.ask_torch().error
    monkeypatch.setattr(devices, "GPU_FILES", ("/nowhere",))
    assert devices.ask_torch() == devices.Devices()


def test_a_gpu_that_does_not_answer_hides_no_other(monkeypatch: pytest.MonkeyPatch, capsys: Run) -> None:
    def info(index: int) -> tuple[int, int]:
        if index == 0:
            raise RuntimeError("out of memory")
        return 5, 7

    cuda = SimpleNamespace(device_count=lambda: 2, mem_get_info=info, get_device_name=lambda index: "GPU")
    torch: Any = SimpleNamespace(cuda=cuda, backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert devices.main() == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == [None, ["GPU (cuda:1)", 7, 5]] and "out of memory" in told["error"]


def test_a_directory_that_holds_a_run(tmp_path: Path, model: Path) -> None:
    config = load_config(config_file(tmp_path, model))
    run_dir = Path(config.run_dir)

    def tried(*, resume: bool) -> list[str]:
        return [fault.what for fault in gather(config, resume=resume, thorough=False).tried]

    assert tried(resume=False) == [] and "nothing to resume" in tried(resume=True)[0]
    (run_dir / "checkpoints" / "step_1").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_1" / "x").write_bytes(bytes(5000))
    (run_dir / "run.json").write_text('{"run": "0011"}')
    (run_dir / "status.json").write_text("{}")
    assert "--resume" in tried(resume=False)[0] and tried(resume=True) == []
    (room,) = gather(config, resume=True, thorough=False).rooms
    assert room.taken == 5000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (run_dir / "listen.json").write_text(f'["/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"]')
        assert "in use" in tried(resume=True)[0]
        journal = Journal.open(run_dir / "journal.sqlite", "0011")
        (line,) = tried(resume=True)
        assert "another learner is running" in line, "its port is no fault of its own"
        journal.close()
    (run_dir / "listen.json").write_text("no list")
    assert "listen.json" in tried(resume=True)[0]
