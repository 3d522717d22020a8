"""What keeps a run from starting or from learning, of its settings and of the facts about machine and model. Pure.

A problem is certain: the run would fail, or learn nothing. A note is what a person should know and may want.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from learner.config import LearnerConfig, LocalEngineSection, RolloutSection
from learner.endpoint.settings import is_loopback
from learner.preflight.facts import Facts, Memory, ModelShape
from learner.preflight.needs import disk_needs, memory_forecast, memory_needs, plain_costs, training_plan
from learner.section import Finding
from learner.trainer.forecast.forecast import REFERENCE, MemoryForecast, room_to_keep
from learner.trainer.forecast.words import line, table, what_helps
from learner.trainer.optimizers.kinds import FLOAT32
from p2p.quantities import human_bytes


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look before the start brought."""

    problems: tuple[str, ...]
    """one line each"""
    notes: tuple[str, ...]
    """one line each"""
    memory: tuple[str, ...] = ()
    """what training takes, before it begins: one line, and one more where that is more than there is"""
    table: tuple[str, ...] = ()
    """the same, item by item"""


def check(config: LearnerConfig, facts: Facts, wrong: Collection[str] = ()) -> Findings:
    """`wrong` are keys of which is known that they are wrong: nothing more is said of what follows from them."""
    everything = [*facts.tried, *_useless(config), *_no_room_to_answer(facts), *_too_little_room(config, facts),
                  *_too_little_memory(config, facts)]  # fmt: skip
    notes = [Finding(note) for note in facts.notes]
    notes += [*_odd(config), *_context(config, facts.model), *_what_it_takes(config, facts)]
    problems, said = (tuple(p.what for p in found if not set(wrong).intersection(p.keys)) for found in (everything, notes))
    takes = _takes(config, facts)
    if takes is None:
        return Findings(problems, said)
    return Findings(problems, said, (f"memory: {line(takes)}", *_more_than_there_is(takes, facts)), table=tuple(table(takes)))


def _useless(config: LearnerConfig) -> Iterator[Finding]:
    """Settings under which our trainer would learn nothing."""
    if config.external_trainer:
        return
    rollout = config.rollout
    if rollout.samples == 1:
        yield Finding(
            "rollout.samples = 1: the advantage of a completion is relative to its group, and a group of one has none, so "
            "nothing would be learned; at least 2, usually 8 to 16",
            ("rollout.samples",),
        )


def _odd(config: LearnerConfig) -> Iterator[Finding]:
    """Settings that do nothing, or something else than a person may expect, beside the others."""
    rollout, trainer, local = config.rollout, config.trainer, config.local_engine
    if rollout.on_update != "finish" and rollout.finish_s != RolloutSection().finish_s:
        yield Finding('rollout.finish_s does nothing: it goes with rollout.on_update = "finish"', ("rollout.on_update",))
    if not local.engine and local != LocalEngineSection():
        yield Finding("[local_engine] does nothing: local_engine.engine is not set", ("local_engine.engine",))
    if config.endpoint.listen and not is_loopback(config.endpoint.listen):
        yield Finding(
            f"endpoint.listen = {config.endpoint.listen!r} is reached from other machines, and the key travels in plain text: "
            "put a proxy with TLS before it, or listen on 127.0.0.1",
            ("endpoint.listen",),
        )
    if config.external_trainer:
        return
    if trainer.objective in ("gspo", "gepo") and trainer.aggregate != "sequence":
        yield Finding(
            f'trainer.objective = "{trainer.objective}" weighs whole completions, and trainer.aggregate = "{trainer.aggregate}" '
            'makes long ones count more; "sequence" is its paper\'s',
            ("trainer.objective", "trainer.aggregate"),
        )
    if rollout.max_new_tokens > trainer.micro_batch_tokens:
        yield Finding(
            f"a completion of rollout.max_new_tokens = {rollout.max_new_tokens} is longer than trainer.micro_batch_tokens = "
            f"{trainer.micro_batch_tokens}: it goes alone through a forward pass, which then takes more memory than that",
            ("rollout.max_new_tokens", "trainer.micro_batch_tokens"),
        )
    if rollout.micro_batch_groups > rollout.groups_per_step:
        yield Finding(
            f"rollout.micro_batch_groups = {rollout.micro_batch_groups} is more than rollout.groups_per_step = "
            f"{rollout.groups_per_step}: the trainer begins with a step when all of its groups are there",
            ("rollout.micro_batch_groups", "rollout.groups_per_step"),
        )
    if trainer.lr_ramp > trainer.steps > 0:
        yield Finding(
            f"trainer.lr_ramp = {trainer.lr_ramp} is more than trainer.steps = {trainer.steps}: the learning rate never gets to "
            "trainer.lr",
            ("trainer.lr_ramp", "trainer.steps"),
        )
    if trainer.eval_every and not trainer.eval_size:
        yield Finding("trainer.eval_every does nothing: trainer.eval_size = 0 turns that evaluation off", ("trainer.eval_size",))


def _context(config: LearnerConfig, model: ModelShape | None) -> Iterator[Finding]:
    if model is None or not model.context or model.longest_prompt >= model.context:
        return  # not known, or a problem already
    asked = model.longest_prompt + config.rollout.max_new_tokens
    if asked > model.context:
        yield Finding(
            f"prompts of some {model.longest_prompt} tokens and rollout.max_new_tokens = {config.rollout.max_new_tokens} are "
            f"more than the model's context of {model.context} tokens: completions end there",
            ("rollout.max_new_tokens", "model"),
        )


def _no_room_to_answer(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if model is not None and 0 < model.context <= model.longest_prompt:
        yield Finding(
            f"model: its context of {model.context} tokens leaves no room to answer prompts of some {model.longest_prompt}",
            ("model", "task.name"),
        )


def _too_little_room(config: LearnerConfig, facts: Facts) -> Iterator[Finding]:
    model = facts.model
    everything = disk_needs(config, ModelShape(0) if model is None or model.more_parts else model)
    for room in facts.rooms:
        needs = everything.of(room.parts)
        if needs.least <= room.free + room.taken:
            continue
        parts = [f"{human_bytes(needs.journal)} for journal and logs"] if needs.journal else []
        if needs.versions:
            parts = [f"{human_bytes(needs.versions)} for versions", *parts]
        if needs.checkpoints:
            parts = [f"{human_bytes(needs.checkpoints)} for {needs.copies} checkpoints", *parts]
        place = "choose another run_dir" if room is facts.rooms[0] else "choose another place for what is linked there"
        advice = " or lower trainer.checkpoint_keep" if needs.checkpoints else ""
        yield Finding(
            f"run_dir: the disk of {room.folder} has {human_bytes(room.free)} free, and the run needs about "
            f"{human_bytes(needs.total - room.taken)}: {', '.join(parts)}; {place}{advice}",
            ("run_dir",),
        )


def _too_little_memory(config: LearnerConfig, facts: Facts) -> Iterator[Finding]:
    if config.external_trainer or facts.model is None or not facts.model.parameters or facts.model.more_parts:
        return
    needs = memory_needs(config, facts.model, gpu=not facts.on_cpu)
    gpu = not facts.on_cpu
    found = memory_forecast(config, plain_costs(config, facts.model, gpu=gpu), gpu=gpu)
    keys = ("model", "trainer.device", "trainer.kl_coef", "trainer.served_dtype")
    fewer = found.size_of(REFERENCE) / facts.model.parameters
    spare = f" ({fewer:g} bytes fewer with trainer.kl_coef = 0)" if fewer else ""
    masters = f"{needs.a_parameter:g} bytes for each of {facts.model.parameters / 1e9:.2f} billion parameters{spare}"
    copies = f"{human_bytes(needs.host)} for copies of versions"
    for memory, least in _memories(facts, needs.device, needs.host):
        if least > memory.total + memory.swap:
            why = masters if memory is facts.gpu else f"{masters}, and {copies}" if facts.on_cpu else copies
            yield Finding(
                f"model: {memory.name} has {human_bytes(memory.total)} of memory, and training needs at least "
                f"{human_bytes(least)}: {why}, before activations; {what_helps(found)}",
                keys,
            )


def _what_it_takes(config: LearnerConfig, facts: Facts) -> Iterator[Finding]:
    """How near the run comes to what is there."""
    model = facts.model
    if model is None or not model.parameters:
        return
    if model.more_parts:
        yield Finding("model: it has parts beside the language model, which training may not load: the sizes here are the most")
    for room in facts.rooms:
        disk = disk_needs(config, model).of(room.parts)
        what = " and ".join(part for part in room.parts if part != "journal") or "journal and logs"
        where = f" in {room.folder}" if len(facts.rooms) > 1 else ""
        held = f", {human_bytes(room.taken)} held by this run" if room.taken else ""
        tight = "; that is tight" if disk.total > room.free + room.taken else ""
        yield Finding(f"disk: about {human_bytes(disk.total)} for {what}{where}, {human_bytes(room.free)} free{held}{tight}")
    if config.external_trainer:
        return
    needs = memory_needs(config, model, gpu=not facts.on_cpu)
    for i, (memory, least) in enumerate(_memories(facts, needs.device, needs.host)):
        first = i == 0 and (facts.gpu is not None or facts.on_cpu)
        about = f", and about {human_bytes(needs.logits)} for logits, a chunk at a time" if first and needs.logits else ""
        full = least + (needs.logits if first else 0)
        tight = "; that is tight: lower trainer.micro_batch_tokens" if least <= memory.total < full else ""
        tight = "; that is more than it has without swap, slow" if memory.total < least <= memory.total + memory.swap else tight
        busy = "; other programs hold the rest" if memory.free < full <= memory.total else ""
        yield Finding(
            f"memory: at least {human_bytes(least)}{about}, before activations; {memory.name} has {human_bytes(memory.free)} "
            f"free of {human_bytes(memory.total)}{tight}{busy}"
        )


def _takes(config: LearnerConfig, facts: Facts) -> MemoryForecast | None:
    """What our trainer is forecast to take; None where there is none, or the model is not known."""
    model = facts.model
    if config.external_trainer or model is None or not model.parameters or model.more_parts:
        return None
    costs, room = facts.costs or plain_costs(config, model, gpu=not facts.on_cpu), 0
    memory = facts.host if facts.on_cpu else facts.gpu
    if memory is not None and config.trainer.activation_checkpointing == "auto" and config.trainer.devices == 1:
        frozen = training_plan(config, gpu=not facts.on_cpu).frozen_bytes * (costs.parameters - costs.trained)
        room = room_to_keep(memory.free - frozen - FLOAT32 * costs.trained, costs.trained)
    return memory_forecast(config, costs, gpu=not facts.on_cpu, room=room)


def _more_than_there_is(takes: MemoryForecast, facts: Facts) -> Iterator[str]:
    for memory, needed in _memories(facts, takes.device, 0 if facts.on_cpu else takes.host):
        if needed > memory.total:
            yield (
                f"memory: {memory.name} has {human_bytes(memory.total)}, less than the {human_bytes(needed)} that training is "
                f"forecast to take: {what_helps(takes)}"
            )


def _memories(facts: Facts, device: int, host: int) -> Iterator[tuple[Memory, int]]:
    """Each memory that is known, and the least that training takes of it."""
    if facts.gpu is not None:
        yield facts.gpu, device
    if facts.host is not None:
        yield facts.host, device + host if facts.on_cpu else host
