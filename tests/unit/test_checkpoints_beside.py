"""Checkpoints beside training: what is written is the state that was taken, whatever training does meanwhile; one at a time."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from learner.client.beside import Beside
from learner.client.port import ResumeInfo
from learner.tasks.registry import make_task
from learner.trainer.checkpoints import checkpoint, tensor_file
from learner.trainer.checkpoints.checkpoint import load_checkpoint, take_snapshot, write_snapshot
from learner.trainer.checkpoints.tensor_file import DTYPES, Readers, write_tensors
from learner.trainer.checkpoints.writing import CheckpointFailed, Checkpoints
from learner.trainer.model import load_model
from learner.trainer.policy import PolicyTrainer, TrainingDiverged
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import WholeModel
from learner.trainer.trainer import run_trainer
from netem.demo.tiny_model import build_random_model
from tests.support.trainer_twins import FakeClient, step_groups
from tests.support.watchdog import PATIENCE_S

TASK = make_task("reverse", 0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_model(tmp_path_factory.mktemp("tiny"), size="0.4m")


# --- files -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.dictionaries(
        st.text(min_size=1, max_size=6),
        st.tuples(st.sampled_from(sorted(DTYPES, key=str)), st.lists(st.integers(0, 5), max_size=3)), max_size=8,
    )
)  # fmt: skip
def test_safetensors_reads_what_was_written(
    shapes: dict[str, tuple[torch.dtype, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("file") / "t.safetensors"
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in shapes.items()}
    write_tensors(path, tensors)
    back = load_file(path)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert back[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_a_type_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"z: .*complex64"):
        write_tensors(tmp_path / "t", {"z": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize("pieces_before", [0, 1, 3, 7, 8])
def test_tensors_may_change_once_they_are_let_go(
    pieces_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the writer is: it has written `pieces_before` pieces when the trainer wants to change the tensors."""
    monkeypatch.setattr(tensor_file, "PIECE", 1 << 10)
    monkeypatch.setattr(tensor_file, "SMALL", 16)
    tensors = {name: torch.randn(1024) for name in "ab"}  # four pieces each
    before = {name: t.clone() for name, t in tensors.items()}
    readers, go_on, there = Readers(tensors), threading.Event(), threading.Event()
    written, write = [0], os.write

    def slow(file: int, data: Any) -> int:
        if len(data) == 1 << 10:
            if written[0] == pieces_before:
                there.set()
                assert go_on.wait(PATIENCE_S)
            written[0] += 1
        return write(file, data)

    monkeypatch.setattr(os, "write", slow)
    beside = Beside("write")
    beside.start(lambda: write_tensors(tmp_path / "t", readers))
    if pieces_before < 8:
        assert there.wait(PATIENCE_S)
    else:
        beside.settle()
    going = Beside("let go")
    going.start(readers.let_go)  # it waits for the piece that is being written, and for no other
    go_on.set()
    going.settle()
    for tensor in tensors.values():
        tensor.fill_(7.0)
    beside.settle()
    back = load_file(tmp_path / "t")
    assert all(torch.equal(back[name], before[name]) for name in tensors)


# --- one at a time ---------------------------------------------------------------------------------------------------


class Trains:
    """A model, its optimizer, and checkpoints of them; a commit waits until it may."""

    def __init__(self, root: Path, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        self.trained = WholeModel(torch.nn.Linear(300, 300))
        self.optimizer = optimizer([p for _, p in self.trained.parameters()], **options)  # type: ignore[call-arg]
        self.may, self.committed = threading.Event(), list[tuple[int, Path]]()
        self.may.set()
        self.root = root
        self.checkpoints = Checkpoints(
            root, self.trained, self.optimizer, self.commit, epoch=1, config={}, keep=2, committed=0
        )
        self.at: dict[int, torch.Tensor] = {}

    def commit(self, step: int, folder: Path) -> None:
        assert self.may.wait(PATIENCE_S) and (folder / "meta.json").is_file()
        self.committed.append((step, folder))

    def step(self, step: int) -> None:
        for _, p in self.trained.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()
        self.at[step] = self.trained.module.weight.detach().clone()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.SGD, {"lr": 0.1}),
     (torch.optim.Adafactor, {}), (torch.optim.AdamW, {"amsgrad": True})],
)  # fmt: skip
def test_each_checkpoint_is_of_its_step(optimizer: type[torch.optim.Optimizer], options: dict[str, Any], tmp_path: Path) -> None:
    trains = Trains(tmp_path, optimizer, **options)
    for step in range(1, 6):
        trains.step(step)
        trains.checkpoints.begin(step)
    before = trains.optimizer.state_dict()
    trains.checkpoints.settle()
    assert [step for step, _ in trains.committed] == [1, 2, 3, 4, 5] and trains.checkpoints.committed == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_4", "step_5"]
    for step in (4, 5):
        again = Trains(tmp_path, optimizer, **options)
        assert load_checkpoint(tmp_path / f"step_{step}", again.trained, again.optimizer) == step
        assert torch.equal(again.trained.module.weight, trains.at[step])  # type: ignore[arg-type]
    after = again.optimizer.state_dict()
    assert before["state"].keys() == after["state"].keys()
    for index, entries in before["state"].items():
        for key, value in entries.items():
            assert value is None or torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][index][key])), key


def test_the_next_one_waits_for_the_commit_of_the_one_before(tmp_path: Path) -> None:
    trains = Trains(tmp_path)
    trains.may.clear()
    trains.step(1)
    trains.checkpoints.begin(1)
    trains.step(2)  # the next step does not wait
    second = Beside("second")
    second.start(lambda: trains.checkpoints.begin(2))
    while not (tmp_path / "step_1").exists():
        pass
    assert second.busy and not trains.committed and not list(tmp_path.glob("*step_2*"))
    trains.may.set()
    second.settle()
    trains.checkpoints.settle()
    assert [step for step, _ in trains.committed] == [1, 2]
    assert trains.checkpoints.waited_s > 0 and trains.checkpoints.write_s > 0


def test_a_full_disk_is_one_line_and_costs_nothing_that_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains = Trains(tmp_path)
    trains.step(1)
    trains.checkpoints.begin(1)
    trains.checkpoints.settle()
    left, write = [100_000], os.write

    def full(file: int, data: Any) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(tensor_file.os, "write", full)
    trains.step(2)
    trains.checkpoints.begin(2)
    with pytest.raises(CheckpointFailed, match=r"checkpoint of step 2 .*No space left.*resume") as caught:
        trains.checkpoints.settle()
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"], "what it had written gives its room back"
    assert trains.committed == [(1, tmp_path / "step_1")] and trains.checkpoints.committed == 1


# --- the trainer's loop ----------------------------------------------------------------------------------------------


def config(folder: Path, root: Path, **changes: Any) -> TrainerConfig:
    base = {"device": "cpu", "threads": 1, "steps": 4, "max_new_tokens": 8, "served_dtype": "float32"}
    return TrainerConfig(model=str(folder), checkpoint_dir=str(root), **{**base, **changes})


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_beside_is_the_run_without(tiny: Path, tmp_path: Path, every: int) -> None:
    """Weights of every step and the checkpoints' tensors, bit for bit; all is committed at the end."""
    _, tokenizer = load_model(tiny, "cpu")
    runs = []
    for name, beside in (("a", True), ("b", False)):
        client = FakeClient(lambda step: step_groups(step, tokenizer, TASK))
        both = {"checkpoint_beside": beside, "publish_beside": beside}
        run_trainer(client, config(tiny, tmp_path / name, checkpoint_every=every, **both))
        runs.append(client)
        assert client.finished
        assert [step for step, _ in client.committed] == ([1, 2, 3, 4] if every == 1 else [2, 4] if beside else [3, 4])
        assert all(line["checkpoint/behind"] <= every for _, line in client.logs)
    ours, theirs = runs
    for step, tensors in ours.published.items():
        assert all((bits == theirs.published[step][name][1]).all() for name, (_, bits) in tensors.items())
    for file in ("model.safetensors", "optimizer.safetensors", "rng.safetensors"):
        assert (tmp_path / "a" / "step_4" / file).read_bytes() == (tmp_path / "b" / "step_4" / file).read_bytes(), file


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_no_kill_takes_back_more_steps_than_was_asked_for(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """After every optimizer step, however slow the disk is."""
    _, tokenizer = load_model(tiny, "cpu")
    client = FakeClient(lambda step: step_groups(step, tokenizer, TASK))
    behind, real, write = list[int](), PolicyTrainer.step, checkpoint.write_tensors

    def slow(path: Path, tensors: Any) -> None:
        time.sleep(0.2)
        write(path, tensors)

    def step(self: PolicyTrainer, number: int) -> dict[str, float]:
        metrics = real(self, number)
        behind.append(number + 1 - max((step for step, _ in client.committed), default=0))
        return metrics

    monkeypatch.setattr(PolicyTrainer, "step", step)
    monkeypatch.setattr(checkpoint, "write_tensors", slow)
    run_trainer(client, config(tiny, tmp_path, checkpoint_every=every, steps=6))
    assert len(behind) == 6 and max(behind) <= every, behind


def test_what_diverges_leaves_the_steps_before_it_committed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = load_model(tiny, "cpu")
    client = FakeClient(lambda step: step_groups(step, tokenizer, TASK))
    may, write = threading.Event(), checkpoint.write_tensors

    def late(path: Path, tensors: Any) -> None:
        assert may.wait(PATIENCE_S)
        write(path, tensors)

    def diverge(self: Any, step: int) -> dict[str, float]:
        if step < 1:
            return real(self, step)
        may.set()  # the checkpoint of step 1 is still being written
        raise TrainingDiverged("step 1: loss is nan")

    real = PolicyTrainer.step
    monkeypatch.setattr(PolicyTrainer, "step", diverge)
    monkeypatch.setattr(checkpoint, "write_tensors", late)
    with pytest.raises(TrainingDiverged):
        run_trainer(client, config(tiny, tmp_path, checkpoint_every=2))
    assert [step for step, _ in client.committed] == [1]
    assert sorted(client.discarded) == [g.group_id for g in step_groups(1, tokenizer, TASK)]
    again = FakeClient(lambda step: step_groups(step, tokenizer, TASK), start=ResumeInfo(2, 1, client.committed[-1][1]))
    monkeypatch.undo()
    run_trainer(again, config(tiny, tmp_path))
    assert [step for step, _ in again.committed] == [2, 3, 4]


def test_a_snapshot_holds_the_settings_of_its_moment(tmp_path: Path) -> None:
    trains = Trains(tmp_path)
    trains.step(1)
    snapshot = take_snapshot(1, trains.trained, trains.optimizer, epoch=1, config={})
    trains.optimizer.param_groups[0]["lr"] = 9.0
    snapshot.let_go()
    folder = write_snapshot(tmp_path, snapshot)
    again = Trains(tmp_path)
    load_checkpoint(folder, again.trained, again.optimizer)
    assert again.optimizer.param_groups[0]["lr"] == 1e-3
