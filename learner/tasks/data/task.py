"""The task `data`: problems are rows. Must not know torch, tokenizers or which reward functions there are.

All rows are looked at once when the task is made: what is no prompt is found before a run starts and not in the middle. Of each
row three numbers are kept: where it begins, its number for a person, and how long its prompt is.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from learner.tasks.data.form import Asked, BadRow, PromptForm
from learner.tasks.data.order import Order, shuffled
from learner.tasks.data.rows import DataRows, DatasetName, Row, open_dataset, open_file
from learner.tasks.port import Prompt, Score, Task
from learner.tasks.settings import DataSource, TaskSettings
from p2p.errors import UsageError

log = logging.getLogger("shoal.tasks")

TOLD = 5
"""Bad rows that a message names: enough to see what is wrong with a file."""

TEMPLATE_TOKENS = 1024
"""Tokens that a chat template may add to a prompt's own text: a default system message and the marks of turns. A prompt has at
most as many tokens as bytes, so only prompts that are longer than the model's context less these are tokenized to find out."""


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


class _Source:
    """One source's rows, looked through."""

    def __init__(self, source: DataSource, form: PromptForm, settings: TaskSettings, answer: str) -> None:
        self.rows: DataRows = open_file(source.path) if source.path else open_dataset(
            DatasetName(source.dataset, source.subset, source.split, source.revision)
        )  # fmt: skip
        self.title = self.rows.title
        self.places, self._numbers, self._bytes = array("q"), array("q"), array("q")
        self._skip = settings.bad_rows == "skip"
        train, held_out, content = array("q"), array("q"), hashlib.blake2b(digest_size=16)
        bad, count, scanned = list[str](), 0, 0
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
                count += 1
                bad += [f"{self.title}, row {found.number}: {problem}"] if len(bad) < TOLD else []
                continue
            content.update(json.dumps(found.row, sort_keys=True, default=str).encode(errors="surrogatepass"))
            side = held_out if is_held_out(asked, settings.held_out) else train
            side.append(len(self.places))
            self.places.append(found.at)
            self._numbers.append(found.number)
            whole = form.chat(asked) or ({"content": asked.text},)
            text = form.raw(asked) if not settings.chat else "".join(str(m.get("content")) for m in whole)
            self._bytes.append(len(text.encode(errors="surrogatepass")))
        self.digest = content.hexdigest()
        self.train: Sequence[int] = train
        self.held_out: Sequence[int] = held_out
        if not scanned:
            raise UsageError(f"task.data: {self.title} has no rows")
        self._tell(bad, count, scanned)

    def where(self, at: int) -> str:
        return f"{self.title}, row {self._numbers[at]}"

    def leave_out_long(self, make: Callable[..., Prompt], tokens: Callable[[Prompt], int], most: int) -> int:
        """Refuses or leaves out rows with prompts of more than `most` tokens; how many."""
        lengths = np.frombuffer(self._bytes, dtype=np.int64)
        long, bad = set[int](), list[str]()
        for at in np.flatnonzero(lengths + TEMPLATE_TOKENS > most):
            count = tokens(make(0, self, int(at), held_out=False))
            if count > most:
                long.add(int(at))
                if len(bad) < TOLD:
                    bad.append(f"{self.where(int(at))}: its prompt has {count} tokens, and the model takes {most}")
        self._tell(bad, len(long), len(lengths))
        self.train = array("q", (at for at in self.train if at not in long))
        self.held_out = array("q", (at for at in self.held_out if at not in long))
        return len(long)

    def _tell(self, bad: Sequence[str], count: int, scanned: int) -> None:
        if not count:
            return
        if not self._skip:
            more = f"{self.title}: {count} of {scanned} rows are bad" if count > 1 else ""
            advice = 'mend them, or leave them out by task.bad_rows = "skip"'
            raise UsageError(*(f"task.data: {line}" for line in bad), f"task.data: {more or self.title}: {advice}")
        log.warning("task.data: %d of %d rows of %s are left out; the first: %s", count, scanned, self.title, bad[0])


def is_held_out(asked: Asked, share: float) -> bool:
    """Whether a row is for evaluation: by the hash of what it asks, so that two rows with one question are on one side."""
    text = json.dumps([asked.text, list(asked.messages)], sort_keys=True, default=str)
    drawn = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, person=b"held-out rows").digest()
    return int.from_bytes(drawn, "little") < share * 2.0**64
