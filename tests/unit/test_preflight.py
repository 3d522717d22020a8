"""What is said before a run starts: of settings that do not go together, and of a machine that is too small. Pure facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.config import LearnerConfig, build_config
from learner.preflight.checks import check
from learner.preflight.devices import Devices, computes_on_cpu, pick
from learner.preflight.facts import Facts, Memory, ModelShape, Room
from learner.preflight.needs import disk_needs, memory_forecast, memory_needs, plain_costs
from learner.section import Finding
from learner.trainer.checkpoints.forms import TENSORS, check_devices
from learner.trainer.forecast.facts import ModelCosts
from learner.trainer.forecast.forecast import COPY, LIBRARIES_BYTES
from learner.trainer.logit_chunks import ON_GPU, ON_PROCESSOR
from learner.trainer.optimizers.kinds import check_package
from p2p.errors import UsageError

GIB = 2**30

SMALL = ModelShape(600 * 10**6, vocabulary=150_000, context=40_000, longest_prompt=100)
"""A model of 0.6 billion parameters."""

PLENTY = Facts(
    model=SMALL, rooms=(Room("/data", 500 * GIB),), host=Memory("this machine", 64 * GIB, 60 * GIB),
    gpu=Memory("GPU", 80 * GIB, 80 * GIB),
)  # fmt: skip
ON_CPU = replace(PLENTY, gpu=None, on_cpu=True)


def settings(**sections: Any) -> LearnerConfig:
    return build_config({"run_dir": "r", "model": "m", **sections}, "here")


def problems(facts: Facts = PLENTY, /, wrong: tuple[str, ...] = (), **sections: Any) -> tuple[str, ...]:
    return check(settings(**sections), facts, wrong).problems


def notes(facts: Facts = PLENTY, /, **sections: Any) -> str:
    return "\n".join(check(settings(**sections), facts).notes)


def test_a_sound_run_has_no_problem_and_is_told_what_it_takes() -> None:
    assert problems() == problems(ON_CPU) == ()
    said = notes()
    assert "disk: about" in said and "memory: at least" in said and "GPU has 80 GiB free of 80 GiB" in said
    assert check(settings(), Facts()).problems == check(settings(), Facts()).notes == (), "nothing is known, nothing is said"


def test_what_was_tried_is_a_problem_unless_its_key_is_wrong_anyway() -> None:
    facts = Facts(tried=(Finding("no model folder m", ("model",)), Finding("port 4001 is in use", ("swarm.listen",))))
    assert problems(facts) == ("no model folder m", "port 4001 is in use")
    assert problems(facts, ("model",)) == ("port 4001 is in use",)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"samples": 1}}, ("rollout.samples = 1", "at least 2")),
    ],
)
def test_settings_under_which_nothing_is_learned(sections: dict[str, Any], words: tuple[str, ...]) -> None:
    (line,) = problems(**sections)
    assert all(word in line for word in words)
    assert problems(external_trainer=True, **sections) == (), "another trainer may have another objective"


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"rollout": {"finish_s": 5.0}}, "on_update"),
        ({"local_engine": {"threads": 3}}, "local_engine.engine is not set"),
        ({"trainer": {"objective": "gspo"}}, '"sequence" is its paper\'s'),
        ({"rollout": {"max_new_tokens": 5000}}, "trainer.micro_batch_tokens = 4096"),
        ({"rollout": {"groups_per_step": 2}}, "rollout.micro_batch_groups = 4"),
        ({"trainer": {"lr_ramp": 30, "steps": 20}}, "never gets to"),
        ({"trainer": {"eval_every": 5, "eval_size": 0}}, "eval_every does nothing"),
        ({"rollout": {"max_new_tokens": 39_950}}, "context of 40000"),
    ],
)
def test_settings_that_do_not_do_what_they_seem_to(sections: dict[str, Any], word: str) -> None:
    assert word in notes(**sections) and word not in notes()
    assert problems(**sections) == ()


def test_a_context_without_room_for_an_answer() -> None:
    (line,) = problems(replace(PLENTY, model=replace(SMALL, context=100)))
    assert "context of 100 tokens" in line


def test_layers_that_keep_everything_are_counted_by_what_is_trained() -> None:
    """Of a frozen model neither gradients nor moments come, and in bfloat16 its weights are half as large."""
    costs = ModelCosts(8 * GIB, 1000, 1000, activations=GIB, tokens=4096, layers=60, layer_bytes=GIB // 4, bfloat16=True)
    host = Memory("this machine", 64 * GIB, 60 * GIB)
    lora = {"lora": {"rank": 8}, "compute_dtype": "bfloat16", "device": "cpu"}
    said = check(settings(trainer=lora), replace(PLENTY, costs=costs, host=host, on_cpu=True)).memory[0]
    # A quarter of 60 - 2 x 8 GiB is 43 layers of a quarter GiB, and the pass itself.
    assert "activations 11.8 GiB" in said, said


def test_room_on_the_disk() -> None:
    needs = disk_needs(settings(), SMALL)
    assert needs.copies == 3 and needs.checkpoints == 3 * 12 * SMALL.parameters, "two are kept, one is being written"
    assert 4 * SMALL.parameters < needs.versions < 10 * SMALL.parameters
    assert needs.checkpoints < needs.least < needs.total
    for free, taken, fine in ((needs.least, 0, True), (needs.least - 1, 0, False), (0, needs.least, True), (0, 0, False)):
        assert (problems(replace(PLENTY, rooms=(Room("/data", free, taken),))) == ()) is fine
    (line,) = problems(replace(PLENTY, rooms=(Room("/data", GIB),)))
    assert all(word in line for word in ("/data has 1 GiB free", "20.1 GiB for 3 checkpoints", "trainer.checkpoint_keep"))
    tight = replace(PLENTY, rooms=(Room("/data", needs.least),))
    assert "that is tight" in "\n".join(check(settings(), tight).notes) and "tight" not in notes()
    for trainer, copies in (({"checkpoint_keep": 1}, 2), ({"steps": 0}, 0), ({"steps": 6, "checkpoint_every": 5}, 2)):
        assert disk_needs(settings(trainer=trainer), SMALL).copies == copies
    assert disk_needs(settings(external_trainer=True), SMALL).checkpoints == 0
    double = disk_needs(settings(trainer={"served_dtype": "float32"}), SMALL).versions
    assert double == pytest.approx(2 * needs.versions)
    (line,) = problems(Facts(rooms=(Room("/data", 0),)))
    assert "61 MiB" in line, "a full disk is one for any model"


def test_each_disk_has_room_for_what_is_linked_there() -> None:
    """Checkpoints on one disk, versions on another, the journal where the run is."""
    needs = disk_needs(settings(), SMALL)
    parts = (("journal", needs.journal), ("checkpoints", needs.checkpoints), ("versions", needs.of(["versions"]).least))
    rooms = [Room(f"/{part}", least, parts=(part,)) for part, least in parts]
    assert problems(replace(PLENTY, rooms=tuple(rooms))) == ()
    for i, (part, least) in enumerate(parts):
        full = [*rooms[:i], Room(f"/{part}", least - 1, parts=(part,)), *rooms[i + 1 :]]
        (line,) = problems(replace(PLENTY, rooms=tuple(full)))
        assert f"the disk of /{part}" in line and ("another run_dir" in line) is (part == "journal")
        assert ("trainer.checkpoint_keep" in line) is (part == "checkpoints")
    said = "\n".join(check(settings(), replace(PLENTY, rooms=tuple(rooms))).notes)
    assert "for checkpoints in /checkpoints" in said and "for versions in /versions" in said


def test_memory_of_the_trainer() -> None:
    """16 bytes a parameter on the CPU; on a GPU 2 more for the version published last; with a reference model 2 more on a
    GPU, where it is bfloat16, and 4 on the CPU. Never more than a run may do with: matrices are many, or all."""
    kl, wide, muon, host = {"kl_coef": 0.1}, {"served_dtype": "float32"}, {"optimizer": "muon"}, {"optimizer": "adamw_host"}
    half = {"compute_dtype": "bfloat16"}
    for gpu, more, each in (
        (False, {}, 16), (True, {}, 18), (True, kl, 20), (True, wide, 20), (False, kl, 20), (False, kl | half, 18),
        (True, muon, 14), (True, host, 8), (True, host | {"compute_dtype": "float32"}, 10), (False, host, 16),
        (True, {"devices": 2}, 9), (True, kl | {"devices": 2}, 11), (False, {"devices": 2}, 16),
    ):  # fmt: skip
        assert memory_needs(settings(trainer=more), SMALL, gpu=gpu).a_parameter == each
    few = replace(PLENTY, gpu=Memory("GPU", 10 * GIB, 10 * GIB))
    (line,) = problems(few)
    assert all(word in line for word in ("GPU has 10 GiB", "10.1 GiB", "18 bytes", "0.60 billion")) and "kl_coef" not in line
    assert "(2 bytes fewer with trainer.kl_coef = 0)" in problems(few, trainer={"kl_coef": 0.1})[0]
    assert problems(few, external_trainer=True) == ()
    assert len(problems(replace(ON_CPU, host=Memory("this machine", 10 * GIB, 10 * GIB)))) == 1
    assert problems(replace(PLENTY, host=Memory("this machine", 10 * GIB, 10 * GIB))) == (), "a GPU has its own"
    (line,) = problems(replace(PLENTY, host=Memory("this machine", 1 * GIB, 1 * GIB)))
    assert "this machine has 1 GiB" in line and "copies of versions" in line and "bytes for each" not in line
    assert problems(replace(few, gpu=None)) == (), "which device it will be is not known"


def test_an_adapters_base_is_published_once_and_kept() -> None:
    """On the disk as the first state and as an anchor, on the host as it is served; its own values are too few to count."""
    lora = settings(trainer={"lora": {"rank": 8}})
    assert disk_needs(lora, SMALL).versions == 2 * 2 * SMALL.parameters and disk_needs(lora, SMALL).checkpoints == 0
    assert memory_needs(lora, SMALL, gpu=True).host == 2 * SMALL.parameters + LIBRARIES_BYTES
    for devices, each in ((1, 2), (2, 2)):  # bfloat16; and float32, in two parts
        config = settings(trainer={"lora": {"rank": 8}, "devices": devices})
        assert memory_needs(config, SMALL, gpu=True).a_parameter == each


def test_a_copy_of_a_checkpoint_is_forecast_and_nothing_is_refused_for_it() -> None:
    for trainer, when in (({}, "always"), ({"checkpoint_beside": False}, "saving"), ({"devices": 2}, "saving")):
        config = settings(trainer=trainer)
        found = memory_forecast(config, plain_costs(config, SMALL, gpu=True), gpu=True)
        (copy,) = (item for item in found.items if item.name == COPY)
        assert (copy.when, copy.place, copy.size) == (when, "host", 12 * SMALL.parameters)
        assert memory_needs(config, SMALL, gpu=True).host == 6 * SMALL.parameters + LIBRARIES_BYTES


def test_a_model_with_more_parts_is_never_too_large() -> None:
    """How much of its files training loads is not known."""
    little = replace(PLENTY, rooms=(Room("/data", GIB),), gpu=Memory("GPU", GIB, GIB))
    assert len(problems(little)) == 2
    several = replace(little, model=replace(SMALL, more_parts=True))
    assert problems(several) == () and "parts beside the language model" in notes(several)


def test_logits_take_no_more_than_their_chunks() -> None:
    """However many tokens a forward pass has; fewer tokens than a chunk's take less."""
    few, many = ({"micro_batch_tokens": tokens} for tokens in (64, 100_000))
    assert memory_needs(settings(trainer=many), SMALL, gpu=True).logits == 2 * ON_GPU.size
    assert memory_needs(settings(trainer=many), SMALL, gpu=False).logits == 2 * ON_PROCESSOR.size
    small = memory_needs(settings(trainer=few, rollout={"max_new_tokens": 32}), SMALL, gpu=True)
    assert small.logits == 8 * SMALL.vocabulary * 64 < 2 * ON_PROCESSOR.size
    assert "1.25 GiB for logits" in notes(trainer=many)
    words = replace(SMALL, vocabulary=1000)
    assert memory_needs(settings(trainer=many), words, gpu=True).logits == 8 * 1000 * ON_GPU.tokens


def test_memory_that_is_tight_or_in_use_is_a_note() -> None:
    least = memory_needs(settings(), SMALL, gpu=True).device
    tight = replace(PLENTY, gpu=Memory("GPU", least, least))
    assert problems(tight) == () and "micro_batch_tokens" in notes(tight) and "micro_batch_tokens" not in notes()
    busy = replace(PLENTY, gpu=Memory("GPU", 80 * GIB, 1 * GIB))
    assert problems(busy) == () and "other programs hold the rest" in notes(busy)


def test_swap_counts_before_a_refusal() -> None:
    swapping = replace(ON_CPU, host=Memory("this machine", 10 * GIB, 10 * GIB, swap=20 * GIB))
    assert problems(swapping) == () and "more than it has without swap" in notes(swapping)
    assert len(problems(replace(ON_CPU, host=Memory("this machine", 10 * GIB, 10 * GIB, swap=GIB)))) == 1


def test_devices_by_name() -> None:
    two = Devices((Memory("A (cuda:0)", 80 * GIB, 80 * GIB), Memory("B (cuda:1)", 24 * GIB, 24 * GIB)))
    for name, found in (("auto", "A"), ("cuda", "A"), ("cuda:1", "B"), ("cpu", None)):
        picked = pick(name, two)
        assert (picked and picked.name[0]) == found
    assert pick("auto", Devices()) is None
    for name, devices, word in (("cuda", Devices(), "none"), ("cuda:2", two, "B"), ("mps", two, "mps")):
        with pytest.raises(UsageError, match=word):
            pick(name, devices)


def test_several_devices() -> None:
    """No more than there are, of a kind that can be several, and with an optimizer that goes with them."""
    two = Devices((Memory("A (cuda:0)", 80 * GIB, 80 * GIB), Memory("B (cuda:1)", 24 * GIB, 24 * GIB)))
    assert pick("auto", two, 2) == two.gpus[0] and pick("cpu", two, 3) is None and pick("auto", Devices(), 3) is None
    assert pick("cuda", replace(two, error="the third is full"), 3) == two.gpus[0], "there may be more"
    with pytest.raises(UsageError, match=r"trainer\.devices = 3: torch finds 2 here"):
        pick("auto", two, 3)
    for wrong in ({"optimizer": "muon"}, {"device": "cuda:1"}, {"device": "mps"}):
        settings(trainer=wrong)
        with pytest.raises(UsageError, match="devices = 2 does not go with"):
            settings(trainer=wrong | {"devices": 2})


def test_a_checkpoint_of_one_process_is_not_read_by_several(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    check_devices(folder, 2)  # it is gone
    folder.mkdir()
    check_devices(folder, 1)
    with pytest.raises(UsageError, match=r"trainer\.devices = 2: checkpoint .*step_3 was written by one process"):
        check_devices(folder, 2)
    (folder / TENSORS).mkdir()
    check_devices(folder, 2)


def test_a_package_that_an_optimizer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_package("adamw")
    with pytest.raises(UsageError, match="bitsandbytes"):
        check_package("adamw_8bit")


def test_a_device_that_torch_cannot_tell_of_is_not_known() -> None:
    unknown = Devices(error="it took too long")
    second = Devices((None, Memory("B (cuda:1)", 24 * GIB, 24 * GIB)), error="the first is full")
    for name in ("auto", "cuda", "cuda:3"):
        assert pick(name, unknown) is None and not computes_on_cpu(name, unknown)
        assert pick(name, second) is None and not computes_on_cpu(name, second)
    found = pick("cuda:1", second)
    assert found is not None and found.name == "B (cuda:1)"
    assert computes_on_cpu("auto", Devices()) and computes_on_cpu("cpu", unknown)
