"""Text of a sequence as it is streamed: no split characters, stop strings cut."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.endpoint.choices import Choice, VersionSpan
from learner.endpoint.text import IncrementalText, SequenceText, StopCut
from learner.requests.port import Made
from p2p.version import Version

V4, V5 = Version(1, 4), Version(1, 5)


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def stripping(ids: Sequence[int]) -> str:
    """As SentencePiece does: a blank at the beginning of a text is lost."""
    return decode(ids).removeprefix(" ")


def in_batches(data: Sequence[int], seed: int) -> list[Sequence[int]]:
    rng, batches, at = random.Random(seed), [], 0
    while at < len(data):
        size = rng.randint(1, 5)
        batches.append(data[at : at + size])
        at += size
    return batches


@given(st.text(), st.integers(0, 99))
@pytest.mark.parametrize("whole", [decode, stripping])
def test_pieces_of_text_are_the_whole_and_split_no_character(whole: object, text: str, seed: int) -> None:
    assert callable(whole)
    found = IncrementalText(whole)
    pieces = [found.add(batch) for batch in in_batches(text.encode(), seed)]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + found.end() == whole(text.encode())


@given(st.binary(), st.integers(0, 99))
def test_bytes_that_are_no_text_lose_nothing(data: bytes, seed: int) -> None:
    found = IncrementalText(decode)
    text = "".join(found.add(batch) for batch in in_batches(data, seed)) + found.end()
    assert text.replace("\ufffd", "") == decode(data).replace("\ufffd", "")


def test_what_never_becomes_a_character_is_not_waited_for() -> None:
    found = IncrementalText(decode)
    assert found.add([0xF0]) == ""
    assert found.add([0xF0] * 20)
    assert len(found.add([0xF0] * 1000)) > 900


def test_a_stop_string_that_comes_in_parts_is_cut() -> None:
    cut = StopCut(["</a>", "END"])
    assert [cut.add(part) for part in ("x<", "/", "b>E", "N", "D and more")] == [
        ("x", ""), ("", ""), ("</b>", ""), ("", ""), ("", "END"),
    ]  # fmt: skip


def test_the_first_stop_string_wins_and_of_two_at_one_place_the_longer() -> None:
    assert StopCut(["b", "ab"]).add("xab") == ("x", "ab")
    assert StopCut(["a", "ab"]).add("xab") == ("x", "ab")
    assert StopCut(["ab"], include=True).add("xabc") == ("xab", "ab")


@given(st.text(alphabet="ab"), st.integers(0, 99))
def test_without_a_stop_string_in_it_the_text_is_whole(text: str, seed: int) -> None:
    cut, sent = StopCut(["abba"]), ""
    for batch in in_batches(text.encode(), seed):
        found = cut.add(decode(batch))
        sent += found.text
        if found.stop:
            break
    else:
        sent += cut.end()
    assert sent == text.partition("abba")[0]


def made(text: bytes, finish: str = "", version: Version = V4) -> Made:
    return Made(tuple(text), tuple(-i / 8 for i in range(len(text))), version, finish)


def choice(*stops: str, own_stops: Sequence[int] = (), include: bool = False) -> Choice:
    text = SequenceText(decode, stops, include=include)
    return Choice(0, text, own_stops=own_stops, stop_ids=[0, *own_stops], include_stop=include)


def test_a_stop_string_ends_the_tokens_where_it_ends() -> None:
    found = choice("stop")
    first = found.take(made(b"go st"))
    assert (first.text, first.ids, first.finish) == ("go ", tuple(b"go st"), "")
    last = found.take(made(b"op and on", "length"))
    assert (last.text, last.ids, last.finish) == ("", tuple(b"op"), "stop")
    assert (found.text, found.stop_reason, bytes(found.ids)) == ("go ", "stop", b"go stop")
    assert len(found.logprobs) == len(found.ids)


def test_a_stop_token_is_among_the_ids_and_not_in_the_text() -> None:
    found = choice()
    found.take(made(b"yes\0", "stop"))
    assert (found.text, found.ids[-1], found.finish, found.stop_reason) == ("yes", 0, "stop", None)
    found = choice(own_stops=[ord(".")])
    found.take(made(b"yes.", "stop"))
    assert (found.text, found.stop_reason) == ("yes", ord("."))
    found = choice(own_stops=[ord(".")], include=True)
    found.take(made(b"yes.", "stop"))
    assert found.text == "yes."


def test_a_part_of_a_character_at_the_end_is_told() -> None:
    found = choice()
    assert found.take(made("€".encode()[:2])).text == ""
    assert found.take(made(b"", "length")).text == "\ufffd"


def test_spans_of_versions_cover_the_tokens() -> None:
    found = choice()
    for part in (made(b"ab"), made(b"c"), made(b"de", version=V5), made(b"", "length", V5)):
        found.take(part)
    assert found.spans == [VersionSpan(V4, 0, 3), VersionSpan(V5, 3, 5)]
