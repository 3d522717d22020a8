"""Which completions a person is shown, and in what form: drawn by the run's seed and the step, bounded, as plain values. Pure.

The draw is uniform over all completions that a step trained on, and is made from nothing but the run's seed, the step's number
and the step's groups in order of their ids: no reward and no text has a say in it. Must not know files or tokenizers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from learner.environments.tools import PARSERS, find_calls
from learner.rollouts.buffers import TrainedStep
from learner.trajectory import Gap, Maker, Trajectory
from p2p.printable import cleaned
from p2p.version import Version

WRITTEN_CHARS = 16_000
"""Characters of a prompt or completion in the file: some 4,000 tokens of English are whole, and a step's lines stay small."""

SHOWN_CHARS = 1_000
"""Characters of one in the run's state, which is made anew for each look at it: a screenful."""

WRITTEN_PIECES = 128
"""Pieces of an episode, sampled and given in turn, that a line names: of a longer one the first."""

WRITTEN_PARTS = 32
"""Named parts of a reward that a line gives, so that a line stays small."""

LEAST_CHARS = 160
"""Characters that each piece of an episode has at least, however many share the room: two lines of a terminal."""

SHOWN_PIECES = 24
"""Pieces of an episode in the run's state."""

SHOWN_PARTS = 8
"""Named parts of a reward in the run's state."""

MOST_CALLS = 16
"""Tool calls of one turn that a line names: as many as are made."""

CALL_CHARS = 400
"""Characters of a tool call's arguments."""

SHOWN = 8
"""Samples in the run's state: the newest two steps' by default."""

TAIL_SHARE = 3
"""Of a text that is too long, one part in so many is its end, where an answer stands; the rest is its beginning."""


class DrawnSample(NamedTuple):
    """A completion that is to be shown."""

    step: int
    """optimizer steps done with the one that trained on it"""
    group_id: int
    task_index: int
    trajectory: Trajectory


class MadeSpan(NamedTuple):
    """Tokens in a row that one node made under one version."""

    version: Version
    node: str
    """peer id"""
    tokens: int


class WrittenCall(NamedTuple):
    """A tool call that the model wrote."""

    name: str
    arguments: str
    """as JSON, bounded"""


class WrittenPiece(NamedTuple):
    """Tokens of an episode in a row that the model sampled, or that its environment gave."""

    by: Literal["model", "environment"]
    tokens: int


def draw(trained: TrainedStep, count: int, seed: int) -> list[DrawnSample]:
    """`count` of the step's completions, each as likely as any other; all when there are no more. In order of group, member."""
    every = [
        DrawnSample(trained.step, group.group_id, group.task_index, trajectory)
        for group in sorted(trained.groups, key=lambda group: group.group_id)
        for trajectory in group.trajectories
    ]
    chosen = random.Random(f"samples {seed} {trained.step}").sample(range(len(every)), min(count, len(every)))
    return [every[i] for i in sorted(chosen)]


def made_spans(trajectory: Trajectory) -> list[MadeSpan]:
    """Who made which tokens, under which version, in order."""
    makers = trajectory.makers or (Maker(0, trajectory.node),)
    out = []
    for span in trajectory.spans:
        for i, (start, node) in enumerate(makers):
            stop = makers[i + 1].start if i + 1 < len(makers) else span.stop
            tokens = min(stop, span.stop) - max(start, span.start)
            if tokens > 0:
                out.append(MadeSpan(span.version, node, tokens))
    return out


def pieces_of(trajectory: Trajectory) -> list[WrittenPiece]:
    """Who wrote how many tokens of a completion, in order."""
    out, at = list[WrittenPiece](), 0
    for gap in (*trajectory.given, Gap(len(trajectory.completion_ids), len(trajectory.completion_ids))):
        if gap.start > at:
            out.append(WrittenPiece("model", gap.start - at))
        if gap.stop > gap.start:
            out.append(WrittenPiece("environment", gap.stop - gap.start))
        at = gap.stop
    return out


def described(
    drawn: DrawnSample, prompt: str, completion: str, names: Mapping[str, str], clean: Callable[[str], str],
    texts: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """One line of samples.jsonl. `names`: of nodes by peer id, where they are known; `clean` bounds a text. Of an episode it says
    also who wrote what ("turns", with the `texts` of its pieces and the tool calls in them), of a reward of several parts what
    they are."""
    t = drawn.trajectory
    more: dict[str, Any] = {}
    if t.given:
        pieces = pieces_of(t)[:WRITTEN_PIECES]
        said = [*texts, *("" for _ in pieces[len(texts) :])]
        more["turns"] = [_written(piece, text, len(pieces), t) for piece, text in zip(pieces, said, strict=False)]
    if t.end is not None:
        more["end"] = t.end._asdict()
    if t.parts:
        more["parts"] = {name[:80]: value for name, value in list(t.parts.items())[:WRITTEN_PARTS]}
    return {
        "step": drawn.step, "group": drawn.group_id, "task_index": drawn.task_index, "prompt": clean(prompt),
        "completion": clean(completion), "reward": t.reward, "exact": t.exact, "finish": t.finish,
        "prompt_tokens": len(t.prompt_ids), "completion_tokens": len(t.completion_ids),
        "spans": [
            {"version": str(s.version), "node": names.get(s.node) or s.node, "tokens": s.tokens} for s in made_spans(t)
        ],
        **more,
    }  # fmt: skip


def _written(piece: WrittenPiece, text: str, pieces: int, trajectory: Trajectory) -> dict[str, Any]:
    line = {"by": piece.by, "tokens": piece.tokens, "text": bounded(text, max(LEAST_CHARS, WRITTEN_CHARS // pieces))}
    calls = tool_calls(text) if piece.by == "model" and trajectory.end is not None and trajectory.end.calls else []
    return line | ({"calls": [call._asdict() for call in calls]} if calls else {})


def tool_calls(text: str) -> list[WrittenCall]:
    """The tool calls in a model's text, by the first way of writing them in which there are any."""
    for parser in PARSERS:
        if found := find_calls(text, parser, 0).calls:
            arguments = lambda call: json.dumps(call.arguments, ensure_ascii=False)[:CALL_CHARS]
            return [WrittenCall(call.name[:80], arguments(call)) for call in found[:MOST_CALLS]]
    return []


def bounded(text: str, most: int) -> str:
    """A text of at most `most` characters and a sentence: of a longer one the beginning, what is left out, and the end."""
    if len(text) <= most:
        return text
    tail = most // TAIL_SHARE
    return f"{text[: most - tail]}\n[... {len(text) - most:,} characters are left out ...]\n{text[len(text) - tail :]}"


def clean_lines(text: str) -> str:
    """A text that a terminal prints and does not obey. Its line breaks, tabs and blanks stay: they are what the model wrote."""
    return cleaned(text, "\ufffd", "\n\t")


def shown(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of samples.jsonl as the run's state has it: texts shorter, and cleaned of control characters. ValueError for what is
    no such line."""
    try:
        return {
            "step": int(line["step"]), "prompt": _shown(line["prompt"]), "completion": _shown(line["completion"]),
            "reward": line["reward"], "finish": clean_lines(str(line["finish"]))[:40],
            "spans": [
                {"version": str(s["version"])[:40], "node": clean_lines(str(s["node"]))[:80], "tokens": int(s["tokens"])}
                for s in line["spans"]
            ],
            **_shown_episode(line),
        }  # fmt: skip
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no line of samples: {error!r}") from error


def _shown_episode(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a line says of turns and of the parts of its reward; nothing for a completion of one turn and a reward of one part."""
    more: dict[str, Any] = {}
    if turns := line.get("turns"):
        most = max(LEAST_CHARS, SHOWN_CHARS // len(turns))
        more["turns"] = [
            {
                "by": str(turn["by"])[:20], "tokens": int(turn["tokens"]),
                "text": clean_lines(bounded(str(turn.get("text", "")), most)),
                "calls": [
                    {"name": clean_lines(str(call["name"]))[:80], "arguments": clean_lines(str(call["arguments"]))[:CALL_CHARS]}
                    for call in list(turn.get("calls") or ())[:MOST_CALLS]
                ],
            }
            for turn in turns[:SHOWN_PIECES]
        ]  # fmt: skip
    if end := line.get("end"):
        more["end"] = {"over": clean_lines(str(end["over"]))[:20], "calls": int(end["calls"]), "errors": int(end["errors"])}
    if parts := line.get("parts"):
        numbers = [(name, value) for name, value in parts.items() if isinstance(value, (int, float))]
        more["parts"] = {clean_lines(str(name))[:60]: value for name, value in numbers[:SHOWN_PARTS]}
    return more


def read_lines(text: str) -> list[dict[str, Any]]:
    """The samples in a piece of samples.jsonl, in order. A line that was cut off is left out."""
    out = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            out.append(value)
    return out


def as_lines(samples: Sequence[Mapping[str, Any]]) -> bytes:
    """Lines of samples.jsonl. In ASCII: JSON's escapes carry every character, and no terminal obeys one of them."""
    return "".join(json.dumps(sample) + "\n" for sample in samples).encode("ascii")


def _shown(text: str) -> str:
    return clean_lines(bounded(text, SHOWN_CHARS))
