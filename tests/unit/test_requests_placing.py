"""Which node gets which request, and what training keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.dispatch.node_table import NodeView
from learner.requests.book import RequestBook
from learner.requests.placing import PLACEMENTS_A_LOOK, count_places, place, served
from learner.requests.port import Ask, RequestClass
from p2p.version import Version

V0, V1, V2 = Version(1, 0), Version(1, 1), Version(1, 2)
ASK = Ask(request_class="serving", prompt_ids=(1,), max_new_tokens=4, stop_ids=(), seed=0)
SHARES: dict[RequestClass, float] = {"evaluation": 0.25, "serving": 0.1}


def book_of(serving: int = 0, evaluation: int = 0, exact: Version | None = None) -> RequestBook:
    book = RequestBook(1, {"evaluation": 9999, "serving": 9999})
    book.published(V0)
    book.published(V1)
    for _ in range(serving):
        book.open(replace(ASK, exact_version=exact), 0.0, (V0, V1))
    for _ in range(evaluation):
        book.open(replace(ASK, request_class="evaluation", exact_version=exact), 0.0, (V0, V1))
    return book


def pool(count: int = 10, training: int = 25, capacity: int = 20, **more: object) -> list[NodeView]:
    """Nodes that training has filled."""
    running, waiting = min(training, capacity), max(0, training - capacity)
    return [NodeView(f"n{i}", V1, running, waiting, capacity, **more) for i in range(count)]  # type: ignore[arg-type]


def apply(nodes: list[NodeView], book: RequestBook, wants: bool = True) -> list[NodeView]:
    """Place until nothing more goes anywhere; the nodes with what they got."""
    while found := place(nodes, book, count_places(nodes, SHARES, wants)):
        for sequence, peer in found:
            book.assign(sequence, peer)
            nodes = [replace(n, waiting=n.waiting + 1) if n.peer == peer else n for n in nodes]
    return nodes


def test_a_class_gets_its_share_of_full_nodes_and_not_more() -> None:
    book = book_of(serving=1000, evaluation=1000)
    apply(pool(), book)
    assert (book.holding("serving"), book.holding("evaluation")) == (20, 50)
    assert {book.load(f"n{i}") for i in range(10)} == {7}  # spread
    one = book_of(serving=10)
    apply(pool(1, capacity=4), one)
    assert one.holding("serving") == 1  # of the smallest pool too


def test_what_failed_goes_to_a_node_whose_word_counts() -> None:
    """If it may hold less than it can, too; and it waits where the only other node may hold nothing for now."""
    failed = NodeView("failed", V1, 0, 0, 4)
    stranger, counts = replace(failed, peer="stranger", credible=False), replace(failed, peer="counts", running=3, limit=4)
    full = replace(failed, peer="full", limit=0)
    for others, want in ((stranger, counts), ["counts"]), ((stranger,), ["stranger"]), ((full,), []):
        book = book_of(serving=1)
        (sequence,) = book.waiting("serving")
        sequence.failed_on.add("failed")
        nodes = [failed, *others]
        assert [peer for _, peer in place(nodes, book, count_places(nodes, SHARES, False))] == want


@pytest.mark.parametrize(("attempt", "want"), [(1, "emptier"), (2, "delivers")])
def test_what_two_failed_goes_to_who_delivers_while_many_are_silent(attempt: int, want: str) -> None:
    book = book_of(serving=1)
    (sequence,) = book.waiting("serving")
    sequence.failed_on.add("failed")
    sequence.attempt = attempt
    nodes = [NodeView("emptier", V1, 0, 0, 4, delivers=1.0), NodeView("delivers", V1, 1, 0, 4, delivers=9.0)]
    assert [peer for _, peer in place(nodes, book, count_places(nodes, SHARES, False))] == [want]


def test_while_training_has_nothing_to_do_all_places_are_there_but_the_other_class_keeps_its_own() -> None:
    book = book_of(serving=1000)
    apply(pool(training=0), book, wants=False)
    assert book.holding("serving") == 200
    both = book_of(serving=1000, evaluation=1000)
    apply(pool(training=0), both, wants=False)
    assert both.holding("evaluation") == 180 and both.holding("serving") == 20


def test_one_exact_version_takes_few_nodes() -> None:
    book = book_of(evaluation=1000, exact=V1)
    apply(pool(), book)
    assert sorted(book.load(f"n{i}") for i in range(10)) == [0] * 8 + [20, 20]
    book.node_lost(next(f"n{i}" for i in range(10) if book.load(f"n{i}")))
    apply(pool(), book)
    assert sum(book.load(f"n{i}") > 0 for i in range(10)) == 2
    one = book_of(evaluation=1000, exact=V1)
    apply(pool(2), one)
    assert sorted(one.load(f"n{i}") for i in range(2)) == [0, 10]


def test_a_node_that_holds_a_version_back_is_filled_whatever_the_share() -> None:
    """Training sends it nothing, so the places would stand empty, and training wait for it the longer."""
    nodes = pool(2)
    book = book_of(evaluation=1000, exact=V1)
    apply(nodes, book)
    (peer,) = [n.peer for n in nodes if book.load(n.peer)]
    share = book.load(peer)
    held_back = [replace(n, draining=True, holds_back=True) if n.peer == peer else replace(n, version=V2) for n in nodes]
    apply(held_back, book)
    assert share < book.load(peer) == nodes[0].capacity
    places = count_places(held_back, SHARES, training_wants=True)
    assert book.beyond("evaluation", places.allowed("evaluation", book), places.spared) == []
    assert book.holding("evaluation", places.spared) == 0 < book.holding("evaluation")
    back = count_places([replace(n, version=V2) for n in nodes], SHARES, training_wants=True)
    allowed = back.allowed("evaluation", book)
    assert len(book.beyond("evaluation", allowed, back.spared)) == nodes[0].capacity - allowed


def test_versions_and_states_of_nodes_are_minded() -> None:
    old = [replace(n, version=V0) for n in pool(2)]
    book = book_of(serving=1, exact=V1)
    apply(old, book)
    assert book.waits("serving") == 1
    held_back = [replace(old[0], draining=True, holds_back=True), replace(old[1], draining=True)]
    assert served(held_back) == {V0}
    exact, free = book_of(serving=1, exact=V0), book_of(serving=1)
    apply(held_back, exact)
    apply(held_back, free)
    assert exact.load("n0") == 1 and free.waits("serving") == 1
    dead = book_of(serving=1)
    apply([replace(n, live=False) for n in pool()], dead)
    assert dead.waits("serving") == 1


def test_who_failed_it_is_asked_last() -> None:
    book = book_of(serving=1)
    (s,) = book.waiting("serving")
    nodes = pool(2)
    for _ in range(2):
        apply(nodes, book)
        book.declined(s.node, s.request_id, "no", retryable=False)
    assert s.failed_on == {"n0", "n1"}
    apply(nodes, book)
    assert s.node


def test_a_look_is_bounded() -> None:
    book = book_of(serving=2000)
    nodes = pool(1000, training=0)
    assert len(place(nodes, book, count_places(nodes, SHARES, training_wants=False))) == PLACEMENTS_A_LOOK


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), st.booleans(), st.booleans()), max_size=8),
    st.integers(0, 60), st.integers(0, 60), st.sampled_from([None, V0, V1]),
)  # fmt: skip
def test_shares_hold_whatever_the_nodes_are(rows, serving: int, evaluation: int, exact: Version | None) -> None:
    nodes = [
        NodeView(f"n{i}", V1 if new else V0, min(load, c), max(0, load - c), c, draining=leaves)
        for i, (c, load, new, leaves) in enumerate(rows)
    ]  # fmt: skip
    book = book_of(serving, evaluation, exact)
    apply(nodes, book)
    places = sum(c for c, _, _, leaves in rows if not leaves)
    assert book.holding("serving") <= max(1, int(0.1 * places)) and book.holding("evaluation") <= max(1, int(0.25 * places))
    for i, (capacity, _, _, leaves) in enumerate(rows):
        assert book.load(f"n{i}") <= (0 if leaves else capacity)
