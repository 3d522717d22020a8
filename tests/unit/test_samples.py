"""Samples for people: which are drawn, what is said of them, what the file survives."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from learner.head.sample_file import SampleFile, append, mend
from learner.head.samples import (
    WRITTEN_PIECES,
    as_lines,
    bounded,
    clean_lines,
    described,
    draw,
    made_spans,
    pieces_of,
    read_lines,
    shown,
)  # fmt: skip
from learner.rollouts.buffers import TrainedStep
from learner.run_dir import OLDER_SAMPLES
from learner.trajectory import Gap, Group, Maker, Trajectory, pack_groups, unpack_groups
from p2p.protocol.rollout import Span
from p2p.version import Version

V1, V2 = Version(1, 0), Version(1, 1)


def trajectory(seed: int, reward: float = 0.0, makers: tuple[Maker, ...] = ()) -> Trajectory:
    return Trajectory(
        prompt_ids=(1, 2), completion_ids=(3,) * 10, logprobs=(-1.0,) * 10, spans=(Span(V1, 0, 6), Span(V2, 6, 10)),
        finish="stop", node="b" if makers else "a", seed=seed, reward=reward, makers=makers,
    )  # fmt: skip


def step_of(step: int, reward: float = 0.0, groups: int = 5, samples: int = 4) -> TrainedStep:
    made = [Group(g, g, tuple(trajectory(10 * g + i, reward) for i in range(samples))) for g in range(groups)]
    return TrainedStep(step, tuple(made))


def seeds(trained: TrainedStep, count: int, seed: int) -> list[int]:
    return [drawn.trajectory.seed for drawn in draw(trained, count, seed)]


def test_the_draw_hangs_on_seed_and_step_alone() -> None:
    worst, best = step_of(3, 0.0), step_of(3, 1.0)
    turned = TrainedStep(3, tuple(reversed(worst.groups)))
    assert seeds(worst, 4, 7) == seeds(best, 4, 7) == seeds(turned, 4, 7)
    assert len(set(seeds(worst, 4, 7))) == 4
    assert seeds(worst, 4, 7) != seeds(worst, 4, 8) and seeds(worst, 4, 7) != seeds(step_of(4), 4, 7)
    assert len(seeds(worst, 100, 7)) == 20 and seeds(worst, 0, 7) == []


def test_every_completion_is_drawn_as_often_as_any_other() -> None:
    drawn = Counter(s for step in range(2000) for s in seeds(step_of(step), 2, 0))
    assert len(drawn) == 20 and 140 < min(drawn.values()) and max(drawn.values()) < 270  # 200 each in the mean


def test_spans_say_who_made_what_under_which_version() -> None:
    alone, both = trajectory(0), trajectory(0, makers=(Maker(0, "a"), Maker(4, "b")))
    assert made_spans(alone) == [(V1, "a", 6), (V2, "a", 4)]
    assert made_spans(both) == [(V1, "a", 4), (V1, "b", 2), (V2, "b", 4)]
    drawn = draw(TrainedStep(1, (Group(5, 9, (both,)),)), 1, 0)[0]
    line = described(drawn, "p", "c", {"a": "lab"}, str.upper)
    assert (line["step"], line["group"], line["task_index"], line["prompt"], line["completion"]) == (1, 5, 9, "P", "C")
    assert line["spans"][:2] == [{"version": "1.0", "node": "lab", "tokens": 4}, {"version": "1.0", "node": "b", "tokens": 2}]
    assert read_lines(as_lines([line]).decode()) == [line]


def test_of_an_episode_it_is_said_who_wrote_what() -> None:
    episode = replace(
        trajectory(0), spans=(Span(V1, 0, 2), Span(V2, 5, 9)), given=(Gap(2, 5), Gap(9, 10)), parts={"right": 0.5}
    )
    assert pieces_of(episode) == [("model", 2), ("environment", 3), ("model", 4), ("environment", 1)]
    assert pieces_of(trajectory(0)) == [("model", 10)]
    line = described(draw(TrainedStep(1, (Group(5, 9, (episode,)),)), 1, 0)[0], "p", "c", {}, str, ["8", "lower\x1b[2J"])
    said = [{"by": "model", "tokens": 2, "text": "8"}, {"by": "environment", "tokens": 3, "text": "lower\x1b[2J"}]
    assert line["turns"][:2] == said and line["turns"][3] == {"by": "environment", "tokens": 1, "text": ""}
    assert line["parts"] == {"right": 0.5} and [s["tokens"] for s in line["spans"]] == [2, 4]
    assert read_lines(as_lines([line]).decode()) == [line] and shown(line)["spans"]
    assert shown(line)["turns"][1]["text"] == "lower\ufffd[2J" and shown(line)["parts"] == {"right": 0.5}
    gaps = tuple(Gap(2 * i + 1, 2 * i + 2) for i in range(WRITTEN_PIECES))
    long = replace(episode, completion_ids=(3,) * (2 * WRITTEN_PIECES + 1), given=gaps)
    line = described(draw(TrainedStep(1, (Group(5, 9, (long,)),)), 1, 0)[0], "p", "c", {}, str)
    assert len(line["turns"]) == WRITTEN_PIECES


def test_who_made_what_survives_the_journal_and_older_journals_are_read() -> None:
    group = Group(1, 2, (trajectory(3, 1.0, (Maker(0, "a"), Maker(4, "b"))), trajectory(4, 0.0)))
    assert unpack_groups(pack_groups((group,))) == (group,)
    import msgpack

    old = [[gid, task, [t[:9] for t in members]] for gid, task, members in msgpack.unpackb(pack_groups((group,)))]
    (read,) = unpack_groups(msgpack.packb(old))
    assert read.trajectories[0].makers == () and read.trajectories[1] == group.trajectories[1]


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = "".join(chr(97 + i % 26) for i in range(9000))
    cut = bounded(text, 900)
    assert cut.startswith(text[:600]) and cut.endswith(text[-300:]) and "8,100 characters are left out" in cut
    assert bounded(text, 9000) == text


def test_no_text_moves_a_terminal() -> None:
    evil = "a\x1b[2Jb\rc\x9b31md\u202ee\u2028f\x00\n\tg\ud800"
    assert clean_lines(evil) == "a\ufffd[2Jb\ufffdc\ufffd31md\ufffde\ufffdf\ufffd\n\tg\ufffd"
    line = described(draw(step_of(1), 1, 0)[0], evil, evil, {"a": evil}, str)
    assert as_lines([line]).isascii() and json.loads(as_lines([line]))["completion"] == evil
    assert not any(c in json.dumps(shown(line), ensure_ascii=False) for c in "\x1b\x9b\u202e\u2028")
    with pytest.raises(ValueError, match="no line of samples"):
        shown({"step": 1})


def test_a_full_file_makes_room_once(tmp_path: Path) -> None:
    file, older = tmp_path / "samples.jsonl", tmp_path / OLDER_SAMPLES
    for i in range(7):
        append(file, f'{{"i": {i}}}\n'.encode() * 3, most=60)
    assert [s["i"] for s in read_lines(older.read_text())] == [4] * 3 + [5] * 3
    assert [s["i"] for s in read_lines(file.read_text())] == [6] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == [OLDER_SAMPLES, "samples.jsonl"]


@pytest.mark.parametrize("torn", [b"", b"{", b'{"i": 3, "prompt": "\xe2\x82'])
def test_a_line_that_a_crash_cut_off_is_removed(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_bytes(b'{"i": 1}\n{"i": 2}\n' + torn)
    assert [s["i"] for s in mend(file)] == [1, 2]
    append(file, b'{"i": 4}\n')
    assert [json.loads(line)["i"] for line in file.read_text().splitlines()] == [1, 2, 4]
    assert mend(tmp_path / "none.jsonl") == []


async def test_a_node_whose_name_cannot_be_told_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def name_of(peer: str) -> str:
        raise sqlite3.OperationalError("database is locked")

    async def inline(fn: Callable[[], Any]) -> Any:
        return fn()

    file = SampleFile(tmp_path, 2, 0, tokenizer=None, name_of=name_of, in_thread=inline)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.run)
        file.committed([step_of(1)])
        await file.settled()
        nursery.cancel_scope.cancel()
    assert len(caplog.messages) == 1 and "database is locked" in caplog.messages[0]
