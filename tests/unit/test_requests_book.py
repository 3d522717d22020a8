"""The books of evaluation and serving: each hand-over and refusal, and histories in which nodes lie, decline and die."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.requests.book import MOST_AVOIDED, RequestBook
from learner.requests.port import Ask, Busy, NoSuchVersion
from learner.requests.sequence import RequestSequence, parse_request_id
from learner.rollouts.beside import Taken
from learner.rollouts.group import parse_request
from p2p.errors import ShoalError, UsageError
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version

V0, V1, V2 = Version(2, 0), Version(2, 1), Version(2, 2)
STOP, VOCABULARY = 0, 50
ASK = Ask(request_class="serving", prompt_ids=(1, 2), max_new_tokens=6, stop_ids=(STOP,), seed=3)


def opened(**more: Any) -> RequestBook:
    book = RequestBook(2, {"evaluation": 3, "serving": 3}, VOCABULARY, **more)
    book.published(V0)
    book.published(V1)
    return book


def event(request_id: str, start: int, ids: list[int], version: Version = V1, finish: str = "", **extra: Any) -> TokenEvent:
    logprobs = extra.pop("logprobs", [-(1.0 + start + i) for i in range(len(ids))])
    return TokenEvent.of(request_id, start, ids, np.array(logprobs, np.float32), version, finish, **extra)


def test_tokens_come_in_pieces_by_version_and_a_stop_token_ends_it() -> None:
    book = opened()
    s = book.open(ASK, 0.0, ())
    request = book.assign(s, "a")
    assert (request.request_id, request.prefix_ids, request.seed) == ("s.2.0.0", (), 3)
    assert book.tokens("a", event("s.2.0.0", 0, [5, 6], V0), 1.0).tokens == 2
    made = s.made(0)
    assert made is not None and (made.ids, made.logprobs, made.version, made.finish) == ((5, 6), (-1.0, -2.0), V0, "")
    assert s.made(2) is None
    assert book.tokens("a", event("s.2.0.0", 2, [7, STOP], V1, "stop"), 2.0).tokens == 2
    last = s.made(2)
    assert last is not None and (last.ids, last.version, last.finish) == ((7, STOP), V1, "stop")
    assert book.load("a") == 0 and book.counts["serving"]["ended"] == 1 and book.counts["serving"]["tokens"] == 4
    assert book.tokens("a", event("s.2.0.0", 4, [1]), 3.0) == Taken(late=True)  # late, and nobody's fault


def test_who_loses_one_twice_is_asked_last() -> None:
    book = opened()
    s = book.open(ASK, 0.0, ())
    for lost_before in range(2):
        assert s.failed_on == set() and (s.lost_by == "a") == bool(lost_before)
        book.assign(s, "a")
        book.node_lost("a")
    assert s.failed_on == {"a"}
    book.credible = lambda node: False
    for i in range(2 * MOST_AVOIDED):
        book.assign(s, f"stranger{i}")
        book.node_lost(f"stranger{i}")
    assert len(s.failed_on) == MOST_AVOIDED and f"stranger{2 * MOST_AVOIDED - 1}" in s.failed_on


def test_whoever_goes_on_with_it_gets_all_its_tokens() -> None:
    book = opened()
    s = book.open(ASK, 0.0, ())
    book.assign(s, "a")
    book.tokens("a", event("s.2.0.0", 0, [5, 6]), 1.0)
    assert book.node_lost("a") == 1 and book.waits("serving") == 1 and book.holding("serving") == 0
    assert not s.failed_on, "a line that breaks is nobody's fault"
    request = book.assign(s, "b")
    assert (request.request_id, request.prefix_ids, request.min_version) == ("s.2.0.1", (5, 6), V1)
    late = book.tokens("a", event("s.2.0.0", 2, [9]), 2.0)
    assert late.refusal is None and late.tokens == 0
    book.tokens("b", event("s.2.0.1", 2, [7], finish="interrupt"), 2.0)
    book.assign(s, "c")
    book.declined("c", "s.2.0.2", "full", retryable=True)
    assert s.failed_on == {"c"} and s.declines == 0
    assert book.assign(s, "d").prefix_ids == (5, 6, 7)


@pytest.mark.parametrize(
    "bad", [
        event("s.2.0.0", 1, [5]), event("s.2.0.0", 0, [VOCABULARY]), event("s.2.0.0", 0, [STOP, 5]),
        event("s.2.0.0", 0, [1] * 7), event("s.2.0.0", 0, [5], V2), event("s.2.0.0", 0, [5], V0),
        event("s.2.0.0", 0, [5], finish="stop"), event("s.2.0.0", 0, [5], finish="length"), event("s.2.0.0", 0, [5], finish="?"),
        event("s.2.0.0", 0, [5], logprobs=[float("nan")]), event("s.2.0.0", 0, [5], logprobs=[-99.0]),
        event("s.2.0.0", 0, [5], logprobs=[1.0]), event("s.2.0.0", 0, [], finish="error", message="broken"),
        TokenEvent("s.2.0.0", 0, b"\x01\x00\x00\x00\x01", b"\x00" * 4, V1, finish="", message=""),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_event_is_held_against_its_node(bad: TokenEvent) -> None:
    book = opened(failure_budget=2)
    s = book.open(replace(ASK, exact_version=V1), 0.0, ())
    book.assign(s, "a")
    taken = book.tokens("a", bad, 1.0)
    assert taken.refusal is not None and taken.refusal.peer == "a" and taken.cancel == (("a", "s.2.0.0"),)
    assert s.failed_on == {"a"} and s.attempt == 1 and not s.over and s.tokens == 0
    book.assign(s, "b")
    book.tokens("b", event("s.2.0.1", 0, [5], finish="abort"), 1.0)
    assert isinstance(s.error, ShoalError) and "2 times" in str(s.error) and book.waits("serving") == 0


@pytest.mark.parametrize("digit", ["\u00b2", "\u0664", "\u2460", "\uff11"])
@pytest.mark.parametrize("place", range(3))
def test_what_unicode_calls_a_digit_is_no_number_of_an_id(digit: str, place: int) -> None:
    for number in (digit, "1" + digit):
        parts = ["1", "1", "1"]
        parts[place] = number
        assert parse_request(".".join(parts)) is None
        assert parse_request_id(".".join(["s", *parts])) is None


def test_names_are_never_training_ones_and_unknown_ones_are_refused() -> None:
    book = opened()
    s = book.open(ASK, 0.0, ())
    assert parse_request(s.request_id) is None and parse_request_id("3.0.0") is None
    for name in ("s.2.0", "s.2.0.00", "x.2.0.0", "s.-2.0.0", "s.2.0.0.0", "", "s.2.\u00b2.0", "s." + "1" * 70 + ".1.1"):
        assert parse_request_id(name) is None
        assert book.tokens("a", event(name, 0, [5]), 0.0).refusal is not None
    for name in ("s.3.0.0", "s.2.1.0", "e.2.0.0", "s.2.0.1", "s.2.0.0"):  # the last one waits: it is with nobody
        assert book.tokens("a", event(name, 0, [5]), 0.0).refusal is not None
    assert book.tokens("a", event("s.1.7.0", 0, [5]), 0.0).refusal is None  # of an earlier epoch
    assert not s.over and s.attempt == 0


def test_nodes_that_decline_for_good_end_it_and_nobody_is_blamed() -> None:
    book = opened()
    s = book.open(ASK, 0.0, ())
    for node in "abc":
        book.assign(s, node)
        book.declined(node, s.request_id, "the prompt is too long", retryable=False)
    assert s.error is not None and "the prompt is too long" in str(s.error)
    assert book.counts["serving"]["failed"] == 1


def test_what_may_be_asked_for() -> None:
    book = opened()
    for wrong in (
        {"prompt_ids": ()}, {"prompt_ids": (VOCABULARY,)}, {"prompt_ids": (-1,)}, {"max_new_tokens": 0},
        {"max_new_tokens": 1 << 21}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1},
        {"seed": -1}, {"seed": 1 << 63}, {"stop_ids": tuple(range(65))}, {"exact_version": V0, "min_version": V1},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            book.open(replace(ASK, **wrong), 0.0, ())  # type: ignore[arg-type]
    assert book.open(replace(ASK, temperature=0.0), 0.0, ()).generate().temperature == 0.0
    book.open(ASK, 0.0, ())
    book.open(ASK, 0.0, ())
    with pytest.raises(Busy):
        book.open(ASK, 0.0, ())
    book.open(replace(ASK, request_class="evaluation"), 0.0, ())  # the other class has a limit of its own
    assert book.counts["serving"]["busy"] == 1


def test_no_more_is_asked_for_than_the_model_takes() -> None:
    book = opened()
    book.max_context = 5
    assert book.open(ASK, 0.0, ()).generate().max_new_tokens == 3
    with pytest.raises(UsageError, match="a prompt of 5 tokens"):
        book.open(replace(ASK, prompt_ids=(1, 2, 3, 4, 5)), 0.0, ())


def test_versions_that_are_not_served() -> None:
    book = opened()
    for exact, served, later in ((V2, (), True), (Version(3, 0), (), False), (Version(1, 0), (V1,), False), (V0, (V1,), False)):
        with pytest.raises(NoSuchVersion) as raised:
            book.open(replace(ASK, exact_version=exact), 0.0, served)
        assert raised.value.later is later
    with pytest.raises(NoSuchVersion) as raised:
        book.open(replace(ASK, min_version=V2), 0.0, (V1,))
    assert raised.value.later
    s = book.open(replace(ASK, exact_version=V1), 0.0, ())  # the newest: nodes will come to it
    old = book.open(replace(ASK, exact_version=V0), 0.0, (V0,))
    free = book.open(replace(ASK, min_version=V0), 90.0, ())
    book.expire(1.0, 100.0, (V0,))
    assert not s.over and not old.over
    book.published(V2)
    book.expire(2.0, 100.0, (V2, V1))
    assert isinstance(old.error, NoSuchVersion) and not s.over
    book.expire(101.0, 100.0, (V2, V1))
    assert s.error is not None and not isinstance(s.error, NoSuchVersion) and not free.over


def test_who_leaves_costs_nothing_more() -> None:
    book = opened()
    s, waiting = book.open(ASK, 0.0, ()), book.open(ASK, 0.0, ())
    book.assign(s, "a")
    assert book.cancel(s) == (("a", "s.2.0.0"),) and book.cancel(s) == ()
    assert book.cancel(waiting) == () and book.load("a") == 0 and book.waits("serving") == 0
    assert book.tokens("a", event("s.2.0.0", 0, [5]), 0.0).refusal is None
    other = book.open(ASK, 0.0, ())
    assert book.close("the run is over") == () and str(other.error) == "the run is over"
    with pytest.raises(ShoalError, match="the run is over"):
        book.open(ASK, 0.0, ())


def test_what_is_beyond_the_share_comes_back_cheapest_first() -> None:
    book = opened()
    held = [book.open(ASK, 0.0, ()) for _ in range(3)]
    for s in held:
        book.assign(s, "a")
    book.tokens("a", event(held[2].request_id, 0, [5, 6]), 1.0)
    assert book.beyond("serving", 3) == [] and book.beyond("serving", 1) == [held[1], held[0]]
    held[1].asked_back = True
    assert book.beyond("serving", 2) == [] and book.beyond("serving", 1) == [held[0]]


def true_tokens(s: RequestSequence) -> list[int]:
    """What any honest node makes of it."""
    made = [(s.number * 7 + i * 3) % 11 + (1 if (s.number + i) % 5 else 0) for i in range(s.ask.max_new_tokens)]
    return made[: made.index(STOP) + 1] if STOP in made else made


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_sequence_ends_once_with_all_its_tokens(data: st.DataObject) -> None:
    """Nodes make tokens, double and delay them, decline, lie and die: what readers get is what an honest node would make."""
    book = RequestBook(2, {"evaluation": 9, "serving": 9}, VOCABULARY, failure_budget=1000, decline_budget=1000)
    book.published(V1)
    nodes = ["a", "b", "c"]
    sequences: list[RequestSequence] = []
    read: dict[int, list[int]] = {}
    sent: list[tuple[str, TokenEvent]] = []
    left: set[int] = set()

    def drain(s: RequestSequence) -> None:
        while (made := s.made(len(read[s.number]))) is not None:
            read[s.number] += made.ids

    def honest(s: RequestSequence, count: int) -> TokenEvent:
        ids = true_tokens(s)
        piece = ids[s.tokens : s.tokens + count]
        end = s.tokens + len(piece) == len(ids)
        finish = "" if not end else "stop" if ids[-1] == STOP else "length"
        return event(s.request_id, s.tokens, piece, finish=finish)

    for _ in range(data.draw(st.integers(1, 80))):
        held = [s for s in sequences if s.node]
        waiting = [s for s in sequences if not s.node and not s.over]
        did = data.draw(st.sampled_from(["open", "assign", "tokens", "lie", "again", "decline", "lost", "leave", "interrupt"]))
        if did == "open" and len(sequences) < 6:
            asked = replace(ASK, request_class=data.draw(st.sampled_from(["evaluation", "serving"])))
            sequences.append(book.open(asked, 0.0, ()))
            read[sequences[-1].number] = []
        elif did == "assign" and waiting:
            s = data.draw(st.sampled_from(waiting))
            assert book.assign(s, data.draw(st.sampled_from(nodes))).prefix_ids == tuple(true_tokens(s)[: s.tokens])
        elif did == "again" and sent:
            book.tokens(*data.draw(st.sampled_from(sent)), 0.0)
        elif did == "lost":
            book.node_lost(data.draw(st.sampled_from(nodes)))
        elif did == "leave" and waiting + held:
            s = data.draw(st.sampled_from(waiting + held))
            left.add(s.number)
            book.cancel(s)
        elif held:
            s = data.draw(st.sampled_from(held))
            if did == "tokens":
                sent.append((s.node, honest(s, data.draw(st.integers(1, 3)))))
                assert book.tokens(*sent[-1], 0.0).refusal is None
            elif did == "lie":
                book.tokens(s.node, event(s.request_id, s.tokens + 1, [5]), 0.0)
            elif did == "decline":
                book.declined(s.node, s.request_id, "no", retryable=data.draw(st.booleans()))
            elif did == "interrupt":
                book.tokens(s.node, event(s.request_id, s.tokens, [], finish="interrupt"), 0.0)
        for s in sequences:
            drain(s)
            assert read[s.number] == true_tokens(s)[: len(read[s.number])]
        assert book.holding("evaluation") + book.holding("serving") == sum(book.load(n) for n in nodes)
    for s in sequences:  # and in the end one good node ends them all
        while not s.over:
            if not s.node:
                book.assign(s, "d")
            book.tokens(s.node, honest(s, 2), 0.0)
        drain(s)
        assert s.number in left or (read[s.number] == true_tokens(s) and s.error is None)
    counts = book.counts["evaluation"] + book.counts["serving"]
    assert counts["asked"] == len(sequences) == counts["ended"] + counts["cancelled"] and counts["cancelled"] == len(left)
    assert not list(book.held()) and not book.waits("serving") and not book.waits("evaluation")
