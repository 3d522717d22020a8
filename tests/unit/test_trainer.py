"""The trainer against an in-memory client: streaming, resuming, refusing, reporting."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.client.port import ResumeInfo
from learner.section import check_section
from learner.tasks.prompting import decode_completion, encode_prompt
from learner.tasks.registry import make_task
from learner.trainer.checkpoints.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from learner.trainer.consuming import group_metrics
from learner.trainer.export import export_model
from learner.trainer.forward import layout
from learner.trainer.model import completion_logprobs, load_model, named_state, served_tensors
from learner.trainer.objectives.registry import make_objective
from learner.trainer.packing import (
    FORWARD_COST,
    HALF_FULL,
    WORTH_IT,
    BadBatch,
    ForwardRow,
    Packer,
    check_group,
    cut_forwards,
    padded_tokens,
    row_tokens,
    rows_of,
)  # fmt: skip
from learner.trainer.policy import PolicyTrainer, TrainingDiverged
from learner.trainer.settings import TrainerConfig
from learner.trainer.trained import WholeModel
from learner.trainer.trainer import run_trainer
from learner.trajectory import Group, Trajectory, pack_groups, unpack_groups
from netem.demo.tiny_model import AVERAGED, build_demo_model, build_random_model, char_tokenizer
from p2p.errors import UsageError
from p2p.protocol.rollout import Span
from p2p.version import Version
from tests.support.trainer_twins import FakeClient, make_group, step_groups

TASK = make_task("reverse", 0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_model(tmp_path_factory.mktemp("model"), TASK, steps=4, batch=16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_model(tmp_path_factory.mktemp("tiny"), size="0.4m")


def config(folder: Path, root: Path, **changes: Any) -> TrainerConfig:
    base = {"device": "cpu", "threads": 1, "steps": 3, "max_new_tokens": 8}
    return TrainerConfig(model=str(folder), checkpoint_dir=str(root), **{**base, **changes})


def gradients(folder: Path, cut: list[list[Group]], **changes: Any) -> list[torch.Tensor]:
    """The gradient an optimizer step would see, after dividing by the step's weight."""
    model, _ = load_model(folder, "cpu")
    trainer = PolicyTrainer(model, config(folder, Path("unused"), **changes))
    for groups in cut:
        trainer.accumulate(groups)
    trainer.flush()
    return [p.grad / trainer.weight for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_streaming_equals_the_whole_batch(folder: Path, aggregate: str) -> None:
    rng = np.random.default_rng(0)
    groups = [make_group(i, rng) for i in range(4)]
    whole = gradients(folder, [groups], aggregate=aggregate)
    for order in itertools.islice(itertools.permutations(groups), 0, None, 7):
        streamed = gradients(folder, [[g] for g in order], aggregate=aggregate)
        for a, b in zip(whole, streamed, strict=True):
            assert float((a - b).abs().max()) <= 2e-6 * max(1.0, float(a.abs().max()))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_step_is_the_same_bits_however_its_groups_are_cut(tiny: Path, data: st.DataObject) -> None:
    """Weights, moments and metrics after three steps, in float32."""
    steps = data.draw(st.integers(0, 2**16).map(lambda seed: mixed_steps(seed)))
    tokens, unit = data.draw(st.sampled_from([32, 128, 4096])), data.draw(st.integers(1, 5))
    cuts = [data.draw(st.sets(st.integers(1, len(groups) - 1))) for groups in steps]
    whole, cut = (
        after_steps(tiny, steps, how, micro_batch_tokens=tokens, micro_batch_groups=unit) for how in ([set()] * 3, cuts)
    )
    assert whole == cut


def mixed_steps(seed: int) -> list[list[Group]]:
    """Three steps of groups of many lengths, some without any advantage."""
    rng = np.random.default_rng(seed)
    steps = [[make_group(10 * s + i, rng, size=int(rng.integers(1, 7))) for i in range(rng.integers(2, 9))] for s in range(3)]
    return [[g if rng.random() < 0.7 else flat(g) for g in groups] for groups in steps]


def flat(group: Group) -> Group:
    equal = tuple(dataclasses.replace(t, reward=1.0) for t in group.trajectories)
    return dataclasses.replace(group, trajectories=equal)


def after_steps(folder: Path, steps: list[list[Group]], cuts: list[set[int]], **changes: Any) -> list[Any]:
    """Everything that three optimizer steps leave behind, as bytes; `cuts` are where each step's groups are cut."""
    model, _ = load_model(folder, "cpu")
    trainer = PolicyTrainer(model, config(folder, Path("unused"), **changes))
    metrics = []
    for step, (groups, at) in enumerate(zip(steps, cuts, strict=True)):
        bounds = [0, *sorted(at), len(groups)]
        for a, b in itertools.pairwise(bounds):
            trainer.accumulate(groups[a:b])
        metrics.append(trainer.step(step))
    moments = [t for state in trainer.optimizer.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])]
    return [metrics, *(t.detach().numpy().tobytes() for t in (*model.parameters(), *moments))]


def test_another_order_is_another_sum(tiny: Path) -> None:
    """Why the order of groups is said to count: it shows in the bits, and in nothing larger."""
    steps = mixed_steps(1)
    forth, back = (after_steps(tiny, s, [set()] * 3, micro_batch_tokens=32) for s in (steps, [g[::-1] for g in steps]))
    assert forth[1:] != back[1:]
    for a, b in zip(forth[1:], back[1:], strict=True):
        x, y = np.frombuffer(a, np.float32), np.frombuffer(b, np.float32)
        assert np.abs(x - y).max() <= 1e-3 * np.abs(x).max() + 1e-7


@given(sizes=st.lists(st.lists(st.integers(1, 90), max_size=12), min_size=1, max_size=20), unit=st.integers(1, 5))
def test_the_packer_loses_no_row_and_fills_its_forwards(sizes: list[list[int]], unit: int) -> None:
    packer, budget, packs = Packer(200, unit, padded=True), 200, list[list[ForwardRow]]()
    rows = [[sized_row(i, size) for size in group] for i, group in enumerate(sizes)]
    for group in rows:
        now = packer.add(group)
        packs += now
        if now and not packer._pending:  # else a last one was too small, and waits
            assert padded_tokens(now[-1]) >= (WORTH_IT if len(now) == 1 else HALF_FULL) * budget
    packs += packer.flush()
    assert sorted(map(id, itertools.chain(*rows))) == sorted(id(r) for pack in packs for r in pack)
    assert all(pack and padded_tokens(pack) <= budget for pack in packs)
    assert packer.flush() == []


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=60), budget=st.integers(1, 500))
def test_forwards_cost_no_more_than_any_other_cut(sizes: list[int], budget: int) -> None:
    rows = [sized_row(i, size) for i, size in enumerate(sizes)]

    def cost(packs: list[list[ForwardRow]]) -> float:
        return sum(padded_tokens(pack) + FORWARD_COST * budget for pack in packs)

    cheapest = cost(list(cut_forwards(rows, budget)))
    longest_first, shortest_first = list[list[ForwardRow]](), list[list[ForwardRow]]()
    for packs, order in ((longest_first, sorted(sizes, reverse=True)), (shortest_first, sorted(sizes))):
        for size in order:  # greedy: as many as fit
            row = sized_row(0, size)
            if packs and padded_tokens([*packs[-1], row]) <= budget:
                packs[-1].append(row)
            else:
                packs.append([row])
    assert cheapest <= min(cost(longest_first), cost(shortest_first)) + 1e-6


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=40), budget=st.integers(1, 120),
    unit=st.integers(1, 5), share=st.booleans(), mask=st.sampled_from([200, 1 << 24]),
)  # fmt: skip
def test_packed_forwards_keep_the_budget(
    sizes: list[tuple[int, int]], budget: int, unit: int, share: bool, mask: int
) -> None:
    """What the layout lays is what the budget counts, also where prompts are not shared or are too long for it."""
    rows = [sized_row(i, 1 + size, prompt=(7 + which,) * (1 + 9 * which)) for i, (which, size) in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LARGEST_MASK", mask)
        packer = Packer(budget, unit, share_prompts=share)
        packs = [pack for row in rows for pack in packer.add([row])] + packer.flush()
        for pack in packs:
            laid = len(layout.packed(row_tokens(pack), share_prompts=share).ids)
            assert laid == packer.tokens(pack) and (laid <= budget or len(pack) == 1)
    assert [id(row) for pack in packs for row in pack] == [id(row) for row in rows]


def test_a_row_beyond_the_budget_is_said_once(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    trainer = PolicyTrainer(load_model(tiny, "cpu").model, config(tiny, Path("unused"), micro_batch_tokens=2))
    for step in range(2):
        trainer.accumulate([make_group(2 * step, rng), make_group(2 * step + 1, rng)])
        trainer.step(step)
    (said,) = (record.getMessage() for record in caplog.records if "micro_batch_tokens" in record.getMessage())
    assert re.search(r"group 0 has a completion of \d+ tokens .*trainer\.micro_batch_tokens = 2: ", said)


def sized_row(group_id: int, size: int, prompt: tuple[int, ...] = (1,)) -> ForwardRow:
    """A row of `size` tokens with a prompt of one."""
    spans = (Span(Version(1, 0), 0, size - 1),)
    trajectory = Trajectory(
        prompt_ids=prompt, completion_ids=(2,) * (size - 1), logprobs=(-1.0,) * (size - 1), spans=spans,
        reward=0.0, finish="stop", node="n", seed=0,
    )  # fmt: skip
    return ForwardRow(group_id, trajectory, 1.0)


def test_groups_of_equal_rewards_count_but_do_not_push(folder: Path) -> None:
    rng = np.random.default_rng(2)
    mixed, equal = make_group(0, rng), flat(make_group(1, rng))
    alone, both = gradients(folder, [[mixed]]), gradients(folder, [[mixed, equal]])
    tokens = [sum(len(t.completion_ids) for t in g.trajectories) for g in (mixed, equal)]
    for x, y in zip(alone, both, strict=True):
        torch.testing.assert_close(y, x * tokens[0] / sum(tokens), rtol=1e-5, atol=1e-8)


def test_a_step_without_a_forward_claims_no_measurement(tiny: Path) -> None:
    trainer = PolicyTrainer(load_model(tiny, "cpu").model, config(tiny, Path("unused")))
    trainer.accumulate([flat(make_group(0, np.random.default_rng(2)))])
    assert trainer.step(0) == {"loss/mean": 0.0, "optim/lr": trainer.config.lr / 5, "optim/grad_norm": 0.0}
    trainer.accumulate([make_group(0, np.random.default_rng(2))])
    metrics = trainer.step(1)
    assert metrics["entropy"] > 0 and metrics["ratio/mean"] > 0 and 0 < metrics["off_policy/effective"] <= 1


def test_logprobs_do_not_depend_on_the_padding(folder: Path) -> None:
    model, _ = load_model(folder, "cpu")
    prompts, completions = [(5, 6, 7), (8,), (9, 10, 11, 12, 13)], [(4, 5), (6, 7, 8, 9), (3,)]
    with torch.no_grad():
        together, mask, entropy = completion_logprobs(model, prompts, completions, temperature=0.7, entropy=True)
        assert entropy is not None
        for i, (p, c) in enumerate(zip(prompts, completions, strict=True)):
            logits = model(torch.tensor([[*p, *c]])).logits[0, len(p) - 1 : -1].float() / 0.7
            log_softmax = torch.log_softmax(logits, -1)
            want = log_softmax[torch.arange(len(c)), torch.tensor(c)]
            torch.testing.assert_close(together[i, : len(c)], want, rtol=1e-5, atol=1e-5)
            want = torch.distributions.Categorical(logits=logits).entropy()
            torch.testing.assert_close(entropy[i, : len(c)], want, rtol=1e-5, atol=1e-5)
    assert mask.sum(1).tolist() == [2, 4, 1]


def test_forwards_fit_the_budget_and_lose_no_row() -> None:
    rng = np.random.default_rng(3)
    settings, objective = TrainerConfig(model="", checkpoint_dir=""), make_objective("grpo", {})
    rows = [row for i in range(6) for row in rows_of(make_group(i, rng, size=8), settings, objective)]
    packs = list(cut_forwards(rows, 64))
    assert sorted(map(id, rows)) == sorted(id(r) for pack in packs for r in pack)
    for pack in packs:
        longest = max(len(r.trajectory.prompt_ids) + len(r.trajectory.completion_ids) for r in pack)
        assert longest * len(pack) <= 64
    assert len(list(cut_forwards(rows, 1))) == len(rows)


def with_version(group: Group, *versions: Version) -> Group:
    n = len(group.trajectories[0].completion_ids)
    bounds = [*range(len(versions)), n]
    spans = tuple(Span(v, a, b) for v, a, b in zip(versions, bounds, bounds[1:], strict=False))
    first = dataclasses.replace(group.trajectories[0], spans=spans)
    return dataclasses.replace(group, trajectories=(first, *group.trajectories[1:]))


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ((Version(2, 7),), "3 steps old"),
        ((Version(2, 7), Version(2, 10)), "3 steps old"),  # the oldest span counts
        ((Version(2, 11),), "newer"),
        ((Version(3, 10),), "future epoch"),
        ((Version(1, 7),), "3 steps old"),  # an earlier epoch's step counts as it is
    ],
)
def test_what_breaks_the_invariant_is_refused(versions: tuple[Version, ...], reason: str) -> None:
    rng = np.random.default_rng(4)
    group = make_group(5, rng, version=Version(2, 9))
    while len(group.trajectories[0].completion_ids) < 2:
        group = make_group(5, rng, version=Version(2, 9))
    check_group(group, Version(2, 10), 2)
    check_group(with_version(group, Version(1, 8)), Version(2, 10), 2)
    with pytest.raises(BadBatch, match=rf"step 10, group 5.*{reason}"):
        check_group(with_version(group, *versions), Version(2, 10), 2)


def test_unpaired_logprobs_and_uncovered_tokens_are_refused() -> None:
    group = make_group(0, np.random.default_rng(5))
    first = group.trajectories[0]
    for bad, reason in (
        (dataclasses.replace(first, logprobs=first.logprobs[1:]), "logprobs"),
        (dataclasses.replace(first, spans=()), "cover 0 of"),
        (dataclasses.replace(first, spans=(Span(Version(1, 0), 0, 99),)), "cover 99 of"),
        (dataclasses.replace(first, completion_ids=(), logprobs=(), spans=()), "empty"),
    ):
        with pytest.raises(BadBatch, match=reason):
            check_group(dataclasses.replace(group, trajectories=(bad,)), Version(1, 0), 2)


def test_a_run_commits_before_it_publishes_and_reports(folder: Path, tmp_path: Path) -> None:
    _, tokenizer = load_model(folder, "cpu")
    client = FakeClient(lambda step: step_groups(step, tokenizer, TASK), cuts=2)
    run_trainer(client, config(folder, tmp_path, checkpoint_every=2, checkpoint_beside=False))
    assert client.calls == [
        ("resume", 0), ("publish", 0),
        ("batches", 0), ("publish", 1), ("log", 1),
        ("batches", 1), ("commit", 2), ("publish", 2), ("log", 2),
        ("batches", 2), ("commit", 3), ("publish", 3), ("log", 3),
    ]  # fmt: skip
    assert client.finished
    metrics = client.logs[1][1]
    assert not any(name.startswith("eval/") for name in metrics), "evaluation is the head's and the nodes'"
    for name in (
        "reward/mean", "reward/std", "frac_reward_zero_std", "exact/mean", "completions/mean_length", "loss/mean",
        "completions/clipped_ratio", "entropy", "clip_ratio/low_mean", "mismatch_kl/mean", "mismatch_kl/max",
        "optim/lr", "optim/grad_norm", "time/step", "time/wait_for_batch", "time/publish", "time/commit",
    ):  # fmt: skip
        assert math.isfinite(metrics[name]), name
    assert metrics["exact/mean"] >= 0.5 and metrics["off_policy/max"] == 1 and metrics["off_policy/mean"] == 0.5
    assert json.loads(json.dumps(metrics)) == metrics
    changed = [n for n, (_, bits) in client.published[1].items() if not np.array_equal(bits, client.published[0][n][1])]
    assert len(changed) > 20


def test_what_the_learner_cut_is_told_from_what_used_up_its_budget() -> None:
    ends = ("stop", "length", "truncated", "stop")
    members = tuple(
        Trajectory(
            prompt_ids=(1,), completion_ids=(2,), logprobs=(-1.0,), spans=(Span(Version(1, 0), 0, 1),),
            reward=1.0, finish=finish, node="n", seed=0,
        )
        for finish in ends
    )  # fmt: skip
    metrics = group_metrics(unpack_groups(pack_groups((Group(0, 0, members),))), 0)
    assert metrics["completions/clipped_ratio"] == 0.5 and metrics["completions/truncated_ratio"] == 0.25


@pytest.mark.parametrize(
    "more", [{}, {"minibatches": 2, "objective": "decoupled"}, {"optimizer": "muon"}], ids=["adamw", "minibatches", "muon"]
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(folder: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    _, tokenizer = load_model(folder, "cpu")
    whole = FakeClient(lambda step: step_groups(step, tokenizer, TASK))
    run_trainer(whole, config(folder, tmp_path / "a", steps=4, served_dtype="float32", **more))
    head = FakeClient(lambda step: step_groups(step, tokenizer, TASK))
    run_trainer(head, config(folder, tmp_path / "b", steps=2, served_dtype="float32", **more))
    step, checkpoint = head.committed[-1]
    tail = FakeClient(lambda step: step_groups(step, tokenizer, TASK), start=ResumeInfo(2, step, checkpoint))
    run_trainer(tail, config(folder, tmp_path / "b", steps=4, served_dtype="float32", **more))
    for name, (dtype, bits) in whole.published[4].items():
        assert dtype == "float32"
        assert np.array_equal(bits, tail.published[4][name][1]), name
    assert np.array_equal(tail.published[2]["model.norm.weight"][1], head.published[2]["model.norm.weight"][1])
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["step_3", "step_4"]


@pytest.mark.parametrize("what", ["short", "twice", "stale", "wrong step", "total", "nan"])
def test_bad_streams_stop_the_run_with_step_and_group(folder: Path, tmp_path: Path, what: str) -> None:
    _, tokenizer = load_model(folder, "cpu")
    groups = step_groups(0, tokenizer, TASK)

    class Bad(FakeClient):
        def batches(self, step: int) -> Any:
            for batch in super().batches(step):
                if what == "short":
                    yield dataclasses.replace(batch, last=False)
                elif what == "twice":
                    yield dataclasses.replace(batch, groups=(*batch.groups, batch.groups[0]))
                elif what == "stale":
                    yield dataclasses.replace(batch, groups=(with_version(groups[0], Version(9, 0)),))
                elif what == "wrong step":
                    yield dataclasses.replace(batch, step=step + 1)
                elif what == "total":
                    yield dataclasses.replace(batch, total=5)
                else:
                    t = groups[0].trajectories[0]
                    t = dataclasses.replace(t, logprobs=(math.nan, *t.logprobs[1:]))
                    yield dataclasses.replace(batch, groups=(Group(0, 0, (t, *groups[0].trajectories[1:])),))

    client = Bad(lambda step: groups)
    with pytest.raises(BadBatch, match=r"step 0"):
        run_trainer(client, config(folder, tmp_path))
    assert not client.committed and list(client.published) == [0]
    # whoever resumes must not be handed the same groups again
    came = {"wrong step": [], "stale": [0], "nan": [0]}
    assert sorted(client.discarded) == came.get(what, sorted(g.group_id for g in groups))


def test_a_gradient_that_is_not_finite_changes_nothing(folder: Path) -> None:
    model, _ = load_model(folder, "cpu")
    trainer = PolicyTrainer(model, config(folder, Path("unused")))
    before = [p.detach().clone() for p in model.parameters()]
    trainer.accumulate([make_group(17, np.random.default_rng(6))])
    trainer.flush()
    next(p for p in model.parameters() if p.grad is not None).grad[0, 0] = math.nan  # type: ignore[index]
    with pytest.raises(TrainingDiverged, match=r"step 3.*\[17\]"):
        trainer.step(3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match="no tokens"):
        PolicyTrainer(model, config(folder, Path("unused"))).step(0)


def test_checkpoints_are_whole_or_absent(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model(folder, "cpu")
    trainer = PolicyTrainer(model, config(folder, tmp_path))
    trainer.accumulate([make_group(0, np.random.default_rng(7))])
    trainer.step(0)
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, WholeModel(model), trainer.optimizer, epoch=3, config={"lr": 1.0})
    saved = {n: t.clone() for n, t in named_state(model)}
    draw = torch.rand(3)

    monkeypatch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        save_checkpoint(tmp_path, 11, WholeModel(model), trainer.optimizer, epoch=3, config={})
    monkeypatch.undo()
    assert not (tmp_path / "step_11").exists()
    assert [p.name for p in prune_checkpoints(tmp_path, 2, 10)] == ["step_1", ".step_11.tmp"]
    # A crash came between the save of step 10 and its commit: the run resumed at 2, and 10 is nobody's.
    shutil.copytree(tmp_path / "step_10", tmp_path / "again" / "step_10")
    shutil.copytree(tmp_path / "step_2", tmp_path / "again" / "step_2")
    assert [p.name for p in prune_checkpoints(tmp_path / "again", 1, 2)] == ["step_10"]

    other, _ = load_model(folder, "cpu")
    fresh = PolicyTrainer(other, config(folder, tmp_path))
    assert load_checkpoint(tmp_path / "step_10", WholeModel(other), fresh.optimizer) == 10
    meta = json.loads((tmp_path / "step_10" / "meta.json").read_text())
    assert (meta["step"], meta["epoch"], meta["config"]) == (10, 3, {"lr": 1.0})
    assert all(torch.equal(saved[n], t) for n, t in named_state(other))
    assert torch.equal(torch.rand(3), draw)
    with pytest.raises(UsageError, match="cannot read checkpoint"):
        load_checkpoint(tmp_path / "step_1", WholeModel(other), fresh.optimizer)


def test_served_tensors_are_the_model_deduplicated(folder: Path) -> None:
    model, _ = load_model(folder, "cpu")
    served = served_tensors(model, "bfloat16")
    assert set(served) == {n for n, _ in model.named_parameters()} and "lm_head.weight" not in served
    for name, parameter in model.named_parameters():
        dtype, bits = served[name]
        assert dtype == "bfloat16" and bits.dtype == np.uint16 and bits.shape == tuple(parameter.shape)
        back = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        assert torch.equal(back, parameter.detach().to(torch.bfloat16))
    dtype, bits = served_tensors(model, "float32")["model.norm.weight"]
    assert dtype == "float32" and bits.__array_interface__["data"][0] == model.model.norm.weight.data_ptr()
    with pytest.raises(UsageError, match="int4"):
        served_tensors(model, "int4")


def test_served_tensors_keep_integer_buffers_and_skip_passing_ones() -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    module.register_buffer("count", torch.tensor([1, 2]))
    module.register_buffer("cache", torch.zeros(3), persistent=False)
    served = served_tensors(torch.nn.Sequential(module), "bfloat16")
    assert {n: d for n, (d, _) in served.items()} == {"0.weight": "bfloat16", "0.count": "int64"}


def test_loading_errors_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(UsageError, match="cannot load model") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_export_is_an_ordinary_folder(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_model(folder, "cpu")
    export_model(model, tokenizer, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    theirs = dict(again.named_parameters())
    assert all(torch.equal(p.detach().to(torch.bfloat16), theirs[n]) for n, p in model.named_parameters())
    _, tokenizer = load_model(tmp_path / "out", "cpu")
    assert tokenizer.decode(tokenizer.encode("739120>")) == "739120>"


def test_the_character_tokenizer_inserts_nothing(folder: Path) -> None:
    _, tokenizer = load_model(folder, "cpu")
    assert len(tokenizer) == 48
    text = "12 + 34=  46? a-z."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text) and decode_completion(tokenizer, [*ids, tokenizer.eos_token_id]) == text
    wide = char_tokenizer("\nÄ")
    assert wide.decode(wide.encode("1\nÄ")) == "1\nÄ"


def greedy_exact(model: Any, tokenizer: Any, task: Any, size: int) -> float:
    """The share of held-out problems, whose prompts are all of one length, that are answered right."""
    prompts = [task.held_out(i) for i in range(size)]
    ids = torch.tensor([encode_prompt(tokenizer, prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    texts = [decode_completion(tokenizer, row[ids.shape[1] :].tolist()) for row in out]
    return sum(task.score(p, text).exact for p, text in zip(prompts, texts, strict=True)) / size


def test_warm_up_teaches_and_random_models_have_the_size(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(build_random_model(tmp_path, size="20m"), "cpu")
    assert 15e6 < sum(p.numel() for p in model.parameters()) < 25e6
    assert greedy_exact(model, tokenizer, TASK, 8) == 0.0
    ids = encode_prompt(tokenizer, TASK.held_out(0))
    assert decode_completion(tokenizer, ids) == TASK.held_out(0).text

    task = make_task("reverse", 0, {"digits": 3})
    model, tokenizer = load_model(build_demo_model(tmp_path / "demo", task), "cpu")
    assert greedy_exact(model, tokenizer, task, 32) >= 0.2


def test_a_warm_up_ends_at_the_loss_that_it_is_told(tmp_path: Path) -> None:
    said = list[str]()
    build_demo_model(tmp_path, TASK, target=1.0, nats=3.0, steps=200, batch=16, say=said.append)
    assert "nats, goes on until 3.00" in said[-1] and AVERAGED < len(said) < 100
    assert float(said[-1].rpartition(" nats, ")[0].rpartition(" ")[2]) <= 3.0 < float(said[-3].split(", ")[1].split()[0])


def test_config_round_trips_and_refuses() -> None:
    cfg = TrainerConfig(model="m", checkpoint_dir="c", betas=[0.5, 0.6])
    assert check_section(TrainerConfig, json.loads(cfg.model_dump_json()), "trainer.json") == cfg
    for bad, match in (({"nope": 1}, "nope"), ({"lr": 0.0}, "lr"), ({"aggregate": "x"}, "token"), ({"steps": -1}, "steps")):
        with pytest.raises(UsageError, match=match):
            check_section(TrainerConfig, {**cfg.model_dump(), **bad}, "trainer.json")
