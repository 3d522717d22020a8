"""The parts of the study, as they were laid down before their results were seen. Pure; must not know how they are run.

`matrix` was first. `hot` came after two of its runs (grpo, seed 0, S = 0 and 16) had shown no collapse at the demo's learning
rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from netem.bench.staleness.cases import MATRIX, SEEDS, STALENESS, Case, matrix
from netem.demo.recipes import RECIPES

UNSEEN = 5
"""The seed that no choice has seen."""

THREE = (0, 1, 2)
"""Seeds of parts that look for one thing."""


CHAT_STEPS = 24
"""Of a run of the real model: what six of them take is an hour of a core."""


@dataclass(frozen=True, slots=True)
class StudyPart:
    """What it asks, and its runs."""

    asks: str
    make: Callable[[Sequence[str] | None], list[Case]]
    """its cases, of these objectives instead of its own"""


PLAIN = Case("grpo", 0, 0)


def _matrix(objectives: Sequence[str] | None) -> list[Case]:
    return matrix(PLAIN, objectives or MATRIX, STALENESS, SEEDS)


def _hot(objectives: Sequence[str] | None) -> list[Case]:
    return matrix(replace(PLAIN, lr=1e-3), objectives or MATRIX, (0, 3, 6, 11, 16), THREE)


def _rules(objectives: Sequence[str] | None) -> list[Case]:
    found = list[Case]()
    for lr in (3e-4, 1e-3):
        for rule in ("sqrt", "fourth"):  # at S = 0 they are the matrix's and hot's
            found += matrix(replace(PLAIN, lr=lr, lr_rule=rule), objectives or ("grpo", "grpo-keep", "tis"), (16, 32), THREE)
    return found


def _caps(objectives: Sequence[str] | None) -> list[Case]:
    options: dict[str, list[dict[str, object]]] = {
        "grpo": [{"cap": 1e4}], "grpo-keep": [{"cap": 1.5}, {"cap": 5.0}], "tis": [{"cap": 1.0}, {"cap": 5.0}],
        "prime_rl": [{"distance": 0.1}], "cispo": [{"high": 2.0}], "topr": [{"level": "token"}],
    }  # fmt: skip
    return [
        case for name in objectives or options for one in options.get(name, [])
        for case in matrix(replace(PLAIN, options=one), [name], (16,), THREE)
    ]  # fmt: skip


def _add(objectives: Sequence[str] | None) -> list[Case]:
    return matrix(replace(PLAIN, task="add"), objectives or ("grpo", "grpo-keep", "tis"), (0, 3, 11, 16), SEEDS)


def _sort(objectives: Sequence[str] | None) -> list[Case]:
    return matrix(replace(PLAIN, task="sort"), objectives or ("topr", "grpo"), (0, 3, 11, 16), THREE)


def _equal(objectives: Sequence[str] | None) -> list[Case]:
    return matrix(replace(PLAIN, equal_groups="drop"), objectives or ("grpo", "grpo-keep"), (0, 16), THREE)


def _lengths(objectives: Sequence[str] | None) -> list[Case]:
    mixed = replace(PLAIN, task="mixed")
    kinds = [
        mixed, replace(mixed, extra_groups=4), replace(mixed, cut_share=0.1),
        replace(mixed, cut_share=0.1, trainer={"overlong": "mask"}),
    ]  # fmt: skip
    return [case for one in kinds for case in matrix(one, objectives or ("grpo",), (0, 3), THREE)]


def _chat(objectives: Sequence[str] | None) -> list[Case]:
    recipe = RECIPES["chat"].learner["trainer"]
    of_demo = {name: recipe[name] for name in ("micro_batch_tokens", "activation_checkpointing")}
    case = replace(PLAIN, task="chat", steps=CHAT_STEPS, lr=recipe["lr"], trainer={**of_demo, "compute_dtype": "bfloat16"})
    return matrix(case, objectives or ("topr", "grpo"), (0, 3, 11), (0,))


def _unseen(objectives: Sequence[str] | None) -> list[Case]:
    return matrix(PLAIN, objectives or ("grpo",), (0, 16, 32), (UNSEEN,))


PARTS: Mapping[str, StudyPart] = {
    "matrix": StudyPart("objectives by staleness, at the demo's learning rate", _matrix),
    "hot": StudyPart("the same at lr 1e-3: is there a collapse where the policy moves faster, and what removes it?", _hot),
    "rules": StudyPart("does a learning rate that falls with S help?", _rules),
    "caps": StudyPart("what do other caps and bounds do at S = 16?", _caps),
    "add": StudyPart("is it so on a second task?", _add),
    "sort": StudyPart("and on another, since the model does not learn sums at any age?", _sort),
    "equal": StudyPart("what does it do to replace groups of equal rewards?", _equal),
    "lengths": StudyPart("what do surplus groups and truncation do to reward and lengths, where lengths differ?", _lengths),
    "chat": StudyPart("and with a real model, SmolLM2-135M-Instruct, on the chat demo's questions?", _chat),
    "unseen": StudyPart("and on a seed that no choice has seen?", _unseen),
}  # fmt: skip
"""By name, in the order in which they are run."""
