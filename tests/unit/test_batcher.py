"""The batcher: what waits, for how long, and that it comes out whole, once and in order."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from node.engine.pipe import Events, decode, encode
from node.serving.batcher import FLUSH_S, FLUSH_TOKENS, TOKENS_PER_MESSAGE, TokenBatcher
from p2p.protocol.generation import Tokens
from p2p.protocol.messages import decode as read
from p2p.protocol.rollout import Completion, TokenEvent
from p2p.protocol.wire import MANY
from p2p.protocol.wire import encode as written
from p2p.version import Version

V1, V2 = Version(1, 1), Version(1, 2)


def event(
    name: str, start: int, ids: tuple[int, ...], version: Version = V1, finish: str = "", logprob: float = -0.5
) -> TokenEvent:
    return TokenEvent.of(name, start, ids, np.full(len(ids), logprob, np.float32), version, finish)


def events(messages: list[Tokens]) -> list[TokenEvent]:
    return [run for message in messages for run in message.runs]


def test_nothing_waits_when_there_is_nothing() -> None:
    batch = TokenBatcher()
    assert batch.due == math.inf and batch.take() == []


def test_tokens_of_one_sequence_become_one_run() -> None:
    batch = TokenBatcher()
    batch.add(event("a", 3, (7,), logprob=-1.0), 10.0)
    batch.add(event("b", 0, (1, 2)), 10.1)
    batch.add(event("a", 4, (8, 9), logprob=-2.0), 10.2)
    assert batch.due == 10.0 + FLUSH_S  # by the oldest of them
    (message,) = batch.take()
    a, b = (run for run in message.runs)
    assert (a.request_id, a.start, a.ids, a.logprobs.tolist(), a.version) == ("a", 3, (7, 8, 9), [-1.0, -2.0, -2.0], V1)
    assert (b.request_id, b.start, b.ids) == ("b", 0, (1, 2))
    assert batch.due == math.inf and batch.take() == []


def test_the_next_batch_has_its_own_time() -> None:
    batch = TokenBatcher()
    batch.add(event("a", 0, (1,)), 1.0)
    batch.take()
    batch.add(event("a", 1, (1,)), 5.0)
    assert batch.due == 5.0 + FLUSH_S
    assert [e.start for e in events(batch.take())] == [1]


def test_a_new_version_begins_a_new_run() -> None:
    batch = TokenBatcher()
    for start, version in enumerate((V1, V1, V2)):
        batch.add(event("a", start, (start,), version), 0.0)
    assert [(e.start, e.ids, e.version) for e in events(batch.take())] == [(0, (0, 1), V1), (2, (2,), V2)]


@pytest.mark.parametrize("finish", ["stop", "length", "interrupt", "abort"])
def test_an_end_goes_at_once(finish: str) -> None:
    batch = TokenBatcher()
    batch.add(event("a", 0, (1,)), 1.0)
    batch.add(event("b", 0, (1,)), 1.01)
    batch.add(event("a", 1, (), finish=finish), 1.05)
    assert batch.due <= 1.05
    a, b = events(batch.take())
    assert (a.ids, a.finish) == ((1,), finish) and (b.ids, b.finish) == ((1,), "")


def test_what_one_sequence_may_lose_is_bounded() -> None:
    batch = TokenBatcher()
    for start in range(FLUSH_TOKENS):
        assert batch.due > 0.1
        # A new version in the middle starts the count of what waits no anew.
        batch.add(event("a", start, (1,), V1 if start < 5 else V2), 0.1 * start / FLUSH_TOKENS)
    assert batch.due <= 0.1


def test_dropped_sequences_leave_no_token() -> None:
    batch = TokenBatcher()
    batch.add(event("a", 0, (1,)), 1.0)
    batch.add(event("b", 0, (2,)), 1.0)
    batch.drop(["a", "unknown"])
    batch.add(event("a", 5, (9,)), 1.1)  # the same name again is a new sequence
    assert [(e.request_id, e.start, e.ids) for e in events(batch.take())] == [("b", 0, (2,)), ("a", 5, (9,))]
    batch.add(event("a", 6, (1,)), 2.0)
    batch.drop(["a"])
    assert batch.due == math.inf and batch.take() == []


def test_a_sure_token_has_no_positive_log_probability() -> None:
    """Events come over the engine's socket as read-only arrays."""
    made = TokenEvent.of("a", 0, (1, 2), np.array([1e-7, -1.0], np.float32), V1)
    came = decode(encode(Events([made]))[4:]).events[0]
    batch = TokenBatcher()
    batch.add(came, 0.0)
    (got,) = events(batch.take())
    assert got.logprobs.tolist() == [0.0, -1.0] and got.logprobs.dtype == np.float32


def test_large_batches_are_cut_into_messages() -> None:
    batch = TokenBatcher(flush_tokens=1 << 20)
    for name in range(5):
        batch.add(event(str(name), 0, tuple(range(TOKENS_PER_MESSAGE // 2))), 0.0)
    messages = batch.take()
    assert [len(m.runs) for m in messages] == [2, 2, 1]
    assert [e.request_id for e in events(messages)] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_arrives_whole_whatever_the_order(seed: int) -> None:
    rng = random.Random(seed)
    batch = TokenBatcher()
    made: dict[str, list[int]] = {name: [] for name in "abcd"}
    got = {name: Completion() for name in made}
    now = 0.0
    for _ in range(400):
        now += rng.uniform(0, 0.05)
        name = rng.choice("abcd")
        ids = tuple(rng.randrange(100) for _ in range(rng.randint(1, 3)))
        batch.add(event(name, len(made[name]), ids, Version(1, int(now))), now)
        made[name].extend(ids)
        if now >= batch.due:
            for e in events(batch.take()):
                got[e.request_id].add(e)
        for each in made:  # a token that waits is young, and has few before it
            assert len(made[each]) - len(got[each].ids) < FLUSH_TOKENS
        assert batch.due > now
    for e in events(batch.take()):
        got[e.request_id].add(e)
    assert {name: c.ids for name, c in got.items()} == made


def test_a_message_has_no_more_runs_than_the_wire_takes() -> None:
    batch = TokenBatcher()
    for i in range(2 * MANY + 5):
        batch.add(event(f"{i}.0.0", 0, (7,)), 1.0)
    messages = batch.take()
    assert [len(m.runs) for m in messages] == [MANY, MANY, 5]
    assert all(read(written(m)) == m for m in messages)
