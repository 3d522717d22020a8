"""Environments of the package verifiers, by name: their rows are the prompts, and their own code plays and rewards the episodes.

Must not know torch or tokenizers, and does not import verifiers: a process of its own reads the rows
(`learner/environments/verifiers_rows.py`), and the processes of environments play (`learner/environments/verifiers.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from learner.tasks.data.order import shuffled
from learner.tasks.port import ChatFormat, EnvironmentSource, Prompt, Task
from p2p.errors import UsageError
from p2p.processes import child_environment, die_with_parent, python_command
from p2p.verbs import nearest

log = logging.getLogger("shoal.tasks")

READER = "learner.environments.verifiers_rows"
"""The module that a process runs to read an environment's rows."""

READ_S = 900.0
"""Seconds that reading may take: an environment may fetch its data, and builds what its first episode needs."""

TEMPLATE_TOKENS = 1024
"""Tokens that a chat template and the schemas of a few tools may add to a prompt's own text: only longer ones are tokenized."""

OURS = {"held_out": 0.05, "limit": 0, "tool_parser": "hermes"}
"""The options in the table `shoal`, which are not the environment's, with what they are by default: the share of rows that is
held out where the environment has no evaluation data, the most rows that are read (0: all), and how the model writes calls."""

Messages = Sequence[Mapping[str, Any]]


class VerifiersTask(Task):
    """The installed environment `environment`. Its options are those of `load_environment` (v0) or of verifiers' `[env]` (v1);
    the table `shoal` among them is `OURS`."""

    def __init__(self, environment: str, seed: int, shoal: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.name = f"verifiers:{environment}"
        self.seed = seed
        ours = self._ours(shoal or {})
        found = self._read({"name": environment, "options": options, "limit": ours["limit"], "tool_parser": ours["tool_parser"]})
        self._rows: dict[bool, list[Messages]] = {False: found["train"], True: found["held_out"]}
        self._places = {side: list(range(len(rows))) for side, rows in self._rows.items()}
        """by side, the rows that are prompts"""
        self._own_held_out = bool(found["held_out"])
        if not self._own_held_out:
            away = [i for i, messages in enumerate(found["train"]) if _is_held_out(messages, ours["held_out"])]
            self._places = {False: sorted(set(self._places[False]) - set(away)), True: away}
        self._check_places()
        tools = tuple(found["tools"])
        self.chat_format = ChatFormat(tools=tools)
        self.environment = EnvironmentSource(
            "learner.environments.verifiers:VerifiersEnvironment",
            {"name": environment, "options": options, "tools": list(tools), "tool_parser": ours["tool_parser"]},
            unconfinable="verifiers' environments need sockets on loopback and start programs",
        )
        digest = hashlib.blake2b(json.dumps([self._rows[False], self._rows[True], tools]).encode(), digest_size=16)
        self._digest = digest.hexdigest()

    @property
    def fingerprint(self) -> dict[str, str]:
        return {self.name: self._digest}

    @property
    def held_out_count(self) -> int | None:
        return len(self._places[True])

    def prompt(self, index: int) -> Prompt:
        """See `Task.prompt`: each epoch is a shuffle of its own."""
        places = self._places[False]
        epoch, position = divmod(index, len(places))
        return self._made(index, places[shuffled(position, len(places), (self.seed, "verifiers", epoch))], held_out=False)

    def held_out(self, index: int) -> Prompt:
        """See `Task.held_out`; from the first again after the last. UsageError where no row is held out."""
        places = self._places[True]
        if not places:
            raise UsageError(f"task {self.name}: no row is held out: raise task.options.shoal.held_out")
        return self._made(index, places[index % len(places)], held_out=True)

    def fit(self, tokens: Callable[[Prompt], int], most: int) -> None:
        """See `Task.fit`. Too long rows are left out, and counted."""
        for side, places in self._places.items():
            kept = [row for row in places if self._short(row, side, tokens, most)]
            if len(kept) < len(places):
                log.warning("task %s: %d rows are longer than %d tokens and left out", self.name, len(places) - len(kept), most)
            self._places[side] = kept
        self._check_places()

    def _made(self, index: int, row: int, *, held_out: bool) -> Prompt:
        side = held_out and self._own_held_out
        messages = tuple(self._rows[side][row])
        entry = {"row": row, "held_out": side, "messages": [dict(message) for message in messages]}
        asked = [str(m.get("content")) for m in messages if m["role"] == "user"]
        where = f"{self.name}, {'held-out ' if side else ''}row {row}"
        return Prompt(index, asked[-1] if asked else "", entry, True, held_out=held_out, messages=messages, where=where)

    def _short(self, row: int, held_out: bool, tokens: Callable[[Prompt], int], most: int) -> bool:
        prompt = self._made(0, row, held_out=held_out)
        size = sum(len(str(m.get("content")).encode(errors="surrogatepass")) for m in prompt.messages)
        return size <= most - TEMPLATE_TOKENS or tokens(prompt) <= most

    def _check_places(self) -> None:
        if not self._places[False]:
            raise UsageError(f"task {self.name}: no row is left to train on")

    def _ours(self, given: Any) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            raise UsageError(f"task {self.name}: shoal is a table, and not {given!r:.60}")
        for key in given:
            if key not in OURS:
                raise UsageError(f"task {self.name}: no option shoal.{key}{nearest(key, OURS)}")
        found = {**OURS, **given}
        share, limit = found["held_out"], found["limit"]
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise UsageError(f"task {self.name}: shoal.held_out = {share!r} is no share from 0 to below 1")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise UsageError(f"task {self.name}: shoal.limit = {limit!r} is no number of rows")
        return found

    def _read(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """What the reading process found. UsageError when it found nothing."""
        try:
            asked = json.dumps(ask).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"task {self.name}: its options are not plain values: {error}") from None
        return _found(self.name, asked)


@lru_cache(maxsize=1)
def _found(name: str, asked: bytes) -> dict[str, Any]:
    """What the reading process says to `asked`. The checks before a start make the task too: it is read once for both."""
    log.info("task %s: a process reads its rows and tries its first episode", name)
    try:
        done = subprocess.run(
            python_command(READER), input=asked, capture_output=True, timeout=READ_S, env=child_environment(), check=False,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UsageError(f"task {name}: its rows were not read within {READ_S:g} s") from None
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise UsageError(f"task {name}: the process that reads its rows ended: {last[0]:.300}") from None
    if found["error"]:
        said = found["error"]
        raise UsageError(said if said.startswith("task ") else f"task {name}: {said}")
    return dict(found)


def _is_held_out(messages: Messages, share: float) -> bool:
    """Whether a row is for evaluation: by the hash of its prompt alone, so that no row changes sides when data grow."""
    drawn = hashlib.blake2b(json.dumps(list(messages), sort_keys=True).encode(), digest_size=8, person=b"held-out rows").digest()
    return int.from_bytes(drawn, "little") < share * 2.0**64
