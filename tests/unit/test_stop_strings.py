"""Stop strings: where they cut a sequence, however its text falls into tokens; in the books of training and of requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.environments.port import TurnAnswer
from learner.journal.records import ReservedGroup, UnfinishedGroup
from learner.requests.book import RequestBook
from learner.requests.port import Ask
from learner.rollouts.collector import Collector
from learner.rollouts.group import first_attempt
from learner.rollouts.group_spec import GroupSpec
from learner.rollouts.outcomes import Accepted, Ignored, Sampling, TurnLimits
from learner.rollouts.stop_strings import StopStrings, check_stop_strings
from p2p.errors import UsageError
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version

V5 = Version(1, 5)
END = 0
"""a stop token"""


class Pieces:
    """A tokenizer whose tokens are these pieces of bytes; it drops a blank at the beginning of a text, as SentencePiece does."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)
        self.decoded = 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace").removeprefix(" ")


def split(data: bytes, rng: random.Random) -> list[bytes]:
    pieces = []
    while data:
        size = rng.choice([0, 1, 1, 2, 3, 9])
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def event(start: int, ids: Sequence[int], finish: str = "", name: str = "3.0.0", version: Version = V5) -> TokenEvent:
    return TokenEvent.of(name, start, tuple(ids), np.full(len(ids), -0.5, np.float32), version, finish)


ALPHABET = st.text(alphabet="ab\n é€𝄞", max_size=60)
STRINGS = st.lists(st.text(alphabet="ab\n é€", min_size=1, max_size=6), min_size=1, max_size=3)


@given(ALPHABET, STRINGS, st.integers(0, 10_000))
def test_any_text_in_any_tokens_is_cut_with_the_token_that_completes_the_first_string(
    text: str, strings: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    start = rng.randrange(4)
    decode = Pieces([b"a"] * start + split(text.encode(), rng))
    ids = list(range(len(decode.pieces)))
    whole = [decode(ids[start:end]) for end in range(len(ids) + 1)]
    first = next((end for end in range(start, len(ids) + 1) if any(one in whole[end] for one in strings)), None)

    stop, held, cut = StopStrings(decode, strings), start, None
    while held < len(ids) and cut is None:
        new = ids[held : held + rng.randint(1, 6)]
        left = stop.cut(event(held, new, "length"), ids[:held], start)
        held += left.count
        if left.count < len(new) or not left.finish:
            cut = held
            assert not left.finish and left.whole and left.ids == tuple(new[: left.count])
            assert stop.ended(ids[:held], start)
        else:
            assert left.finish == "length" and not stop.ended(ids[:held], start)
    assert cut == first


def test_a_string_that_began_before_the_turn_does_not_end_it() -> None:
    stop = StopStrings(Pieces([b"Q", b":", b"x"]), ["Q:"])
    assert stop.ended([0, 1], 0) and not stop.ended([0, 1], 1) and not stop.ended([], 0)


def test_what_cannot_end_a_string_costs_no_decoding() -> None:
    decode = Pieces([b"a", b"b", b"\n", b":"])
    stop = StopStrings(decode, ["\n\nQ:"])
    stop.may_end([0, 1, 2, 3])
    before = decode.decoded
    assert not stop.may_end([0, 1, 2] * 1000) and stop.cut(event(9000, [0, 1, 2]), [0, 1, 2] * 3000, 0).count == 3
    assert decode.decoded == before


def test_thousands_of_tokens_at_once_cost_some_looks_and_not_one_a_token() -> None:
    decode = Pieces([b"a:"])
    stop = StopStrings(decode, ["Q:"])
    assert stop.cut(event(8, [0] * 20_000), [0] * 8, 0).count == 20_000
    assert decode.decoded < 100_000
    decode.pieces.append(b"Q:")
    decode.decoded = 0
    assert stop.cut(event(8, [0] * 10_000 + [1] + [0] * 10_000), [0] * 8, 0).count == 10_001
    assert decode.decoded < 20 * 20_000


@pytest.mark.parametrize("strings", [[], ["a", ""]])
def test_no_string_at_all_is_refused(strings: list[str]) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        StopStrings(Pieces([]), strings)


class Words:
    """A Hugging Face tokenizer of single bytes and a special token; it drops a blank at the beginning of a text."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [token for i, part in enumerate(text.split("<end>")) for token in ([256] if i else []) + list(part.encode())]

    def decode(self, ids: Sequence[int], **how: bool) -> str:
        assert how["skip_special_tokens"]
        return bytes(token for token in ids if token != 256).decode().removeprefix(" ")


def test_strings_that_no_completions_text_holds_are_refused_before_the_run() -> None:
    check_stop_strings(Words(), ["\n\nQ:", " blank", "<end>", "é", "#"])
    with pytest.raises(UsageError) as wrong:
        check_stop_strings(Words(), ["##<end>", "<end>\n", "fine", "", 3])
    assert [problem.split(": ")[1].split(" ")[0] for problem in wrong.value.problems] == ["'##<end>'", "'<end>\\n'", "''", "3"]
    assert "the text of its tokens is '##'" in wrong.value.problems[0] and "no text" in wrong.value.problems[2]


# --- training --------------------------------------------------------------------------------------------------------

LETTERS = Pieces([b"", b"\n", b"Q", b":", b"x", b"y", b"\nQ"])


def opened(turns: TurnLimits | None = None) -> Collector:
    collector = Collector(vocab_size=len(LETTERS.pieces))
    collector.published(V5)
    sampling = Sampling(40, (END,), turns=turns, stop=StopStrings(LETTERS, ["\nQ:"]))
    collector.open_group(ReservedGroup(3, 30, V5, 1, 0), GroupSpec((4, 5), [7], 0), sampling)
    collector.assign("3.0.0", "a")
    return collector


def test_a_completion_ends_with_the_token_that_completes_the_string_and_its_node_is_told_to_stop() -> None:
    collector = opened()
    assert collector.extend("a", event(0, [4, 5, 1])) == 3  # what cannot end the string takes the short way
    assert collector.extend("a", event(3, [2, 3, 4, 5])) == 0
    done = collector.tokens("a", event(3, [2, 3, 4, 5]))
    assert isinstance(done, Accepted) and (done.tokens, done.cancel) == (2, (("a", "3.0.0"),)) and done.whole is not None
    (made,) = done.whole.group.trajectories
    assert (made.completion_ids, made.finish, len(made.logprobs)) == ((4, 5, 1, 2, 3), "stop", 5)
    assert [(s.start, s.stop) for s in made.spans] == [(0, 5)]
    [unwritten] = collector.unwritten.take()
    assert len(unwritten) == 5, "the journal has no token after the string either"
    assert collector.tokens("a", event(7, [4])) == Ignored("3.0.0") and collector.working("a") == []


def test_a_string_over_two_nodes_and_one_that_ends_with_the_nodes_own_end() -> None:
    collector = opened()
    collector.tokens("a", event(0, [4, 6]))
    assert collector.node_lost("a") == ["3.0.1"]
    assert collector.assign("3.0.1", "b").prefix_ids == (4, 6)
    done = collector.tokens("b", event(2, [3, 4, END], "stop", name="3.0.1"))
    assert isinstance(done, Accepted) and done.whole is not None and done.cancel == ()  # the node has ended it already
    (made,) = done.whole.group.trajectories
    assert (made.completion_ids, made.finish) == ((4, 6, 3), "stop")


def test_each_turn_of_an_episode_looks_for_its_own_string() -> None:
    collector = opened(TurnLimits(max_turns=3))
    ended = collector.tokens("a", event(0, [4, 6, 3, 5]))
    assert isinstance(ended, Accepted) and ended.tokens == 3 and ended.cancel == (("a", "3.0.0"),)
    (asked,) = collector.episodes.take_work().ask
    assert asked.turns[0].sampled == (4, 6, 3)
    collector.episodes.answered(TurnAnswer(asked.key, 1, given=(5, 6)))  # with which a string begins: it is not the model's
    [waits] = collector.pending()
    collector.assign(waits.request_id, "a")
    assert collector.tokens("a", event(5, [3, 4], name=waits.request_id)).tokens == 2  # type: ignore[union-attr]
    assert not collector.episodes.take_work().ask
    collector.tokens("a", event(7, [6, 3], name=waits.request_id))
    (asked,) = collector.episodes.take_work().ask
    assert asked.turns[1].sampled == (3, 4, 6, 3)


@pytest.mark.parametrize("ids, whole", [((4, 6, 3), True), ((4, 6), False)])
def test_a_resumed_learner_knows_what_had_ended(ids: tuple[int, ...], whole: bool) -> None:
    before = opened()
    before.tokens("a", event(0, ids[:2]))
    if whole:
        before.tokens("a", event(2, ids[2:]))
    pieces = before.unwritten.take()
    group = ReservedGroup(3, 30, V5, 1, 0)
    again = Collector(vocab_size=len(LETTERS.pieces), first_group=4, first_attempt=first_attempt(2))
    again.published(V5)
    sampling = Sampling(40, (END,), stop=StopStrings(LETTERS, ["\nQ:"]))
    left = UnfinishedGroup(group, (tuple(pieces),))
    found = again.restore_group(left, GroupSpec((4, 5), [7], 0), sampling)
    assert (found is not None) == whole
    if found is not None:
        assert found.group.trajectories[0].finish == "stop"


# --- evaluation and serving ------------------------------------------------------------------------------------------


def test_a_request_ends_with_the_token_that_completes_the_string() -> None:
    book = RequestBook(1, {"evaluation": 9, "serving": 9}, len(LETTERS.pieces))
    book.published(V5)
    stop = StopStrings(LETTERS, ["\nQ:"])
    ask = Ask(request_class="evaluation", prompt_ids=(4,), max_new_tokens=20, stop_ids=(END,), seed=1, stop=stop)
    sequence = book.open(ask, 0.0, ())
    book.assign(sequence, "a")
    taken = book.tokens("a", event(0, [4, 1, 2, 3, 5, 5], name="e.1.0.0"), 1.0)
    assert taken.tokens == 4 and taken.cancel == (("a", "e.1.0.0"),) and taken.refusal is None
    made = sequence.made(0)
    assert made is not None and (made.ids, made.finish) == ((4, 1, 2, 3), "stop") and len(made.logprobs) == 4
    assert book.counts["evaluation"]["ended"] == 1 and not book.working("a")
