"""The task `data`: problems are rows. Must not know torch, tokenizers or which reward functions there are.

All rows are looked at once when the task is made: what is no prompt is found before a run starts and not in the middle. Of each
row three numbers are kept: where it begins, its number for a person, and how long its prompt is.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from learner.tasks.data.form import Asked, BadRow, PromptForm
from learner.tasks.data.order import Order, shuffled
from learner.tasks.data.rows import DataRows, DatasetName, Row, open_dataset, open_file
from learner.tasks.port import Prompt, Score, Task, listed
from learner.tasks.settings import DataSource, TaskSettings
from p2p.errors import UsageError

log = logging.getLogger("shoal.tasks")

TOLD = 5
"""Reasons that a message names, each with its first row: enough to see what is wrong with a file."""

TEMPLATE_TOKENS = 1024
"""Tokens that a chat template may add to a prompt's own text: a default system message and the marks of turns. A prompt has at
most as many tokens as bytes, so only prompts that are longer than the model's context less these are tokenized to find out.
Where the shortest prompt has more, of an environment's tools say, it is as many as that has."""


class DataTask(Task):
    """DataRows by number. A subclass may override `score`, `prompt_of` or any other method of the port."""

    def __init__(self, settings: TaskSettings, *, own_score: bool = True) -> None:
        """`own_score`: answers are scored here, so that rows must have their right answer."""
        if not settings.data:
            raise UsageError('task data needs task.data: a file or a data set (data = "train.jsonl")')
        self.name = "data"
        self.settings = settings
        self._form = PromptForm(settings)
        needs = settings.answer if own_score else ""
        self._sources = [_Source(source, self._form, settings, needs) for source in settings.data]
        self._arrange()

    @property
    def fingerprint(self) -> dict[str, str]:
        return {source.title: source.digest for source in self._sources}

    @property
    def held_out_count(self) -> int | None:
        return sum(len(source.held_out) for source in self._sources)

    def prompt(self, index: int) -> Prompt:
        place = self._order.place(index)
        source = self._sources[place.source]
        return self._made(index, source, int(source.train[place.row]), held_out=False)

    def held_out(self, index: int) -> Prompt:
        """See `Task.held_out`; from the first again after the last. UsageError where no row is held out."""
        count = self.held_out_count
        if not count:
            raise UsageError("task.data: no row is held out: raise task.held_out, or set trainer.eval_size = 0")
        left = shuffled(index % count, count, (self.settings.seed, "held-out"))
        for source in self._sources:
            if left < len(source.held_out):
                break
            left -= len(source.held_out)
        return self._made(index, source, int(source.held_out[left]), held_out=True)

    def score(self, prompt: Prompt, completion: str) -> Score:
        """1 for the very text of the answer column, but for white space around it; 0 otherwise."""
        exact = completion.strip() == str(prompt.entry[self.settings.answer]).strip()
        return Score(float(exact), exact)

    def solution(self, prompt: Prompt) -> str | None:
        answer = prompt.entry.get(self.settings.answer)
        return None if answer is None else str(answer)

    def fit(self, tokens: Callable[[Prompt], int], most: int) -> None:
        """See `Task.fit`. DataRows that are surely short enough are not tokenized."""
        if sum(source.leave_out_long(self._made, tokens, most) for source in self._sources):
            self._arrange()

    def need(self, columns: Collection[str], who: str) -> None:
        """See `Task.need`. Rows without one of these columns are bad rows."""
        if type(self).prompt is not DataTask.prompt:  # its problems need not be rows
            return super().need(columns, who)
        if sum(source.leave_out_short(columns, who) for source in self._sources):
            self._arrange()

    def prompt_of(self, row: Row) -> Asked:
        """What a row asks, as the settings say."""
        return self._form.asked(row)

    def _made(self, index: int, source: _Source, at: int, *, held_out: bool) -> Prompt:
        row = source.rows.read(source.places[at])
        where = source.where(at)
        try:
            asked = self.prompt_of(row)
        except BadRow as error:  # it was read before without
            raise UsageError(f"task.data: {where} was written to while the run goes on: {error}") from None
        chat = self.settings.chat
        text, messages = (asked.text, self._form.chat(asked)) if chat else (self._form.raw(asked), ())
        return Prompt(index, text, row, chat, held_out=held_out, messages=messages, where=where)

    def _arrange(self) -> None:
        for source in self._sources:
            if not len(source.train):
                raise UsageError(f"task.data: {source.title} has no row to train on")
        self._order = Order(
            self.settings.seed, [len(source.train) for source in self._sources], [s.weight for s in self.settings.data]
        )


class _BadRows:
    """Rows that are no problems, told by what is wrong with them."""

    def __init__(self) -> None:
        self.count = 0
        self.places = set[int]()
        """of rows that had been taken"""
        self._first: dict[str, str] = {}
        self._counts = Counter[str]()

    def add(self, where: str, problem: str, *, at: int | None = None, reason: str = "") -> None:
        """`reason`: what such rows have in common; otherwise how `problem` begins."""
        reason = reason or problem.partition(": ")[0]
        if at is not None:
            self.places.add(at)
        self.count += 1
        if reason not in self._first and len(self._first) >= TOLD:
            reason = ""
        elif reason not in self._first:
            self._first[reason] = f"{where}: {problem}"
        self._counts[reason] += 1

    def lines(self) -> list[str]:
        """Each reason with its first row, and how many rows more have it."""
        told = [
            line + (f" (and {more} more such row{'s' * (more > 1)})" if (more := self._counts[reason] - 1) else "")
            for reason, line in self._first.items()
        ]
        return told + ([f"and {other} rows for other reasons"] if (other := self._counts[""]) else [])


class _Source:
    """One source's rows, looked through."""

    def __init__(self, source: DataSource, form: PromptForm, settings: TaskSettings, answer: str) -> None:
        self.rows: DataRows = open_file(source.path) if source.path else open_dataset(
            DatasetName(source.dataset, source.subset, source.split, source.revision)
        )  # fmt: skip
        self.title = self.rows.title
        self.places, self._numbers, self._bytes, self._shapes = array("q"), array("q"), array("q"), array("q")
        shapes: dict[tuple[str, ...], int] = {}
        self._skip = settings.bad_rows == "skip"
        train, held_out, content = array("q"), array("q"), hashlib.blake2b(digest_size=16)
        bad, scanned = _BadRows(), 0
        for found in self.rows.scan():
            scanned += 1
            problem = found.problem
            if found.row is not None:
                try:
                    asked = form.asked(found.row)
                    if answer and found.row.get(answer) is None:
                        advice = "set task.answer to the column with the right answer, or task.reward to a function"
                        raise BadRow(f'column "{answer}" is missing: {advice}')
                    problem = ""
                except BadRow as error:
                    problem = str(error)
            if problem:
                bad.add(f"{self.title}, row {found.number}", problem)
                continue
            content.update(json.dumps(found.row, sort_keys=True, default=str).encode(errors="surrogatepass"))
            side = held_out if is_held_out(asked, settings.held_out) else train
            side.append(len(self.places))
            self.places.append(found.at)
            self._numbers.append(found.number)
            assert found.row is not None
            self._shapes.append(shapes.setdefault(tuple(map(str, found.row)), len(shapes)))
            whole = form.chat(asked) or ({"content": asked.text},)
            text = form.raw(asked) if not settings.chat else "".join(str(m.get("content")) for m in whole)
            self._bytes.append(len(text.encode(errors="surrogatepass")))
        self.digest = content.hexdigest()
        self.train: Sequence[int] = train
        self.held_out: Sequence[int] = held_out
        if not scanned:
            raise UsageError(f"task.data: {self.title} has no rows")
        self._columns = tuple(shapes)
        """names of columns, by the row's number in `_shapes`"""
        self._tell(bad, scanned)

    def where(self, at: int) -> str:
        return f"{self.title}, row {self._numbers[at]}"

    def leave_out_long(self, make: Callable[..., Prompt], tokens: Callable[[Prompt], int], most: int) -> int:
        """Refuses or leaves out rows with prompts of more than `most` tokens; how many."""
        lengths = np.frombuffer(self._bytes, dtype=np.int64)
        shortest = tokens(make(0, self, int(lengths.argmin()), held_out=False))  # nearly all of it the template's, and of tools
        may_be = lengths + max(TEMPLATE_TOKENS, shortest) > most
        here = np.zeros_like(may_be)
        for side in (self.train, self.held_out):
            here[np.asarray(side, dtype=np.int64)] = True
        bad = _BadRows()
        for at in np.flatnonzero(may_be & here):
            count = tokens(make(0, self, int(at), held_out=False))
            if count > most:
                problem = f"its prompt has {count} tokens, and the model takes {most}"
                bad.add(self.where(int(at)), problem, at=int(at), reason="long")
        return self._leave_out(bad)

    def leave_out_short(self, columns: Collection[str], who: str) -> int:
        """Refuses or leaves out rows that lack one of these columns; how many."""
        bad = _BadRows()
        lacks = [next((c for c in columns if c not in names), None) for names in self._columns]
        for at in sorted([*self.train, *self.held_out]):
            shape = self._shapes[at]
            if (column := lacks[shape]) is not None:
                problem = f'column "{column}" is missing, which {who} needs ({listed(self._columns[shape])})'
                bad.add(self.where(at), problem, at=at, reason=column)
        return self._leave_out(bad)

    def _leave_out(self, bad: _BadRows) -> int:
        self._tell(bad, len(self.train) + len(self.held_out))
        self.train = array("q", (at for at in self.train if at not in bad.places))
        self.held_out = array("q", (at for at in self.held_out if at not in bad.places))
        return bad.count

    def _tell(self, bad: _BadRows, scanned: int) -> None:
        if not bad.count:
            return
        lines = bad.lines()
        if not self._skip:
            more = f"{self.title}: {bad.count} of {scanned} rows are bad" if bad.count > 1 else self.title
            advice = 'mend them, or leave them out by task.bad_rows = "skip"'
            raise UsageError(*(f"task.data: {line}" for line in lines), f"task.data: {more}: {advice}")
        log.warning("task.data: %d of %d rows of %s are left out: %s", bad.count, scanned, self.title, "; ".join(lines))


def is_held_out(asked: Asked, share: float) -> bool:
    """Whether a row is for evaluation: by the hash of what it asks, so that two rows with one question are on one side."""
    text = json.dumps([asked.text, list(asked.messages)], sort_keys=True, default=str)
    drawn = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, person=b"held-out rows").digest()
    return int.from_bytes(drawn, "little") < share * 2.0**64
