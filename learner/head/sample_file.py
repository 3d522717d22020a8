"""samples.jsonl: what the model wrote, a few completions of every committed step. A thin shell around `samples`.

Texts are decoded and written in a worker thread, after the step's commit: the run waits for none of it, and goes on without a
sample where that fails. A crash between commit and writing costs that step's samples; none is written twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trio

from learner.head.samples import (
    SHOWN,
    WRITTEN_CHARS,
    WRITTEN_PIECES,
    DrawnSample,
    as_lines,
    bounded,
    described,
    draw,
    made_spans,
    pieces_of,
    read_lines,
    shown,
)
from learner.rollouts.buffers import TrainedStep
from learner.run_dir import OLDER_SAMPLES, SAMPLES_FILE
from learner.tasks.prompting import decode_completion, decode_prompt
from learner.trajectory import Trajectory
from p2p.files import append_whole

log = logging.getLogger("shoal.samples")

FILE_BYTES = 32 << 20
"""Bytes of a file: thousands of steps. There are two at the most, so samples never take more than twice that of the disk."""

TAIL_BYTES = 1 << 20
"""Bytes at the end of the file that are looked at when a run begins: more than the samples that are shown."""

WAITING = 64
"""Committed steps whose samples may wait to be written. Further ones go without: the disk is slower than training."""


class SampleFile:
    """`count` samples a step of the run with this `seed`. `name_of(peer)`: a node's name, "" where nobody knows it. `in_thread`
    runs what may take long."""

    def __init__(
        self, run_dir: Path, count: int, seed: int, *, tokenizer: object, name_of: Callable[[str], str],
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:  # fmt: skip
        self._path, self._count, self._seed = run_dir / SAMPLES_FILE, count, seed
        self._tokenizer, self._name_of, self._in_thread = tokenizer, name_of, in_thread
        self._in, self._out = trio.open_memory_channel[list[DrawnSample]](WAITING)
        self._open = 0
        """steps that were drawn from and are not written"""
        self._written = trio.Event()
        self._complained = False
        self.newest: list[dict[str, Any]] = []
        """the latest few, oldest first, fit to be shown"""
        if count:
            try:
                self.newest = _shown_of(mend(self._path))
            except OSError as error:
                self._complain(error)

    def committed(self, steps: Iterable[TrainedStep]) -> None:
        """These steps were trained on, once and for all. Draws from them, and returns at once."""
        for trained in steps if self._count else ():
            drawn = draw(trained, self._count, self._seed)
            if not drawn:
                continue
            try:
                self._in.send_nowait(drawn)
                self._open += 1
            except trio.WouldBlock:
                self._complain(OSError(f"{WAITING} steps wait to be written"))

    async def run(self) -> None:
        """For ever: decode and write what was drawn."""
        async for drawn in self._out:
            try:
                peers = {span.node for sample in drawn for span in made_spans(sample.trajectory)}
                names = {peer: self._name_of(peer) for peer in peers}
                self.newest = [*self.newest, *await self._in_thread(partial(self._write, drawn, names))][-SHOWN:]
            except Exception as error:  # of a disk, a journal or a tokenizer: a run does not end for want of a sample
                self._complain(error)
            self._open -= 1
            self._written.set()
            self._written = trio.Event()

    async def settled(self) -> None:
        """Until all that was committed is written, or was given up."""
        while self._open:
            await self._written.wait()

    def _write(self, drawn: Iterable[DrawnSample], names: Mapping[str, str]) -> list[dict[str, Any]]:
        clean = partial(bounded, most=WRITTEN_CHARS)
        lines = [
            described(
                sample, decode_prompt(self._tokenizer, sample.trajectory.prompt_ids),
                decode_completion(self._tokenizer, sample.trajectory.completion_ids), names, clean,
                texts=self._pieces(sample.trajectory) if sample.trajectory.given else (),
            )
            for sample in drawn
        ]  # fmt: skip
        append(self._path, as_lines(lines))
        return _shown_of(lines)

    def _pieces(self, trajectory: Trajectory) -> list[str]:
        """The text of each piece of an episode; the environment's with its special tokens, as the model reads it."""
        decode = {"model": decode_completion, "environment": decode_prompt}
        texts, at = list[str](), 0
        for piece in pieces_of(trajectory)[:WRITTEN_PIECES]:
            texts.append(decode[piece.by](self._tokenizer, trajectory.completion_ids[at : at + piece.tokens]))
            at += piece.tokens
        return texts

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            log.warning("samples cannot be written: %s (said once; the run goes on)", error)


def append(path: Path, lines: bytes, most: int = FILE_BYTES) -> None:
    """Whole lines at the end of the file, or none: when the disk is full nothing of them stays. A file that would pass `most`
    bytes becomes OLDER_SAMPLES first."""
    try:
        if path.stat().st_size + len(lines) > most:
            os.replace(path, path.with_name(OLDER_SAMPLES))
    except FileNotFoundError:
        pass
    append_whole(path, lines)


def mend(path: Path) -> list[dict[str, Any]]:
    """The last samples in the file, none when there is no file. A line that a crash cut off is removed."""
    try:
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
            whole = tail[: tail.rfind(b"\n") + 1]
            if len(whole) < len(tail):
                file.truncate(size - len(tail) + len(whole))
    except FileNotFoundError:
        return []
    return read_lines(whole.decode("utf-8", "replace"))


def _shown_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for line in lines[-SHOWN:]:
        try:
            out.append(shown(line))
        except ValueError:
            continue  # somebody else's line
    return out
