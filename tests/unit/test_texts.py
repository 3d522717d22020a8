"""What peers say in words is clean where it comes in."""

from __future__ import annotations

from p2p.membership.texts import MAX_NAME, MAX_REASON, MAX_SITE, clean_hello, clean_message
from p2p.protocol.generation import Rejected
from p2p.protocol.join import Bye, Hello, Renewal
from p2p.protocol.versions import Report
from p2p.version import Version

NASTY = "a\x1b]0;owned\x07\u202egnp.exe\u2066\r\n\tb\x00\u200b\ud83d" + "x" * 5000


def sound(text: str, longest: int) -> bool:
    return len(text) <= longest and text.isprintable() and text.startswith("a?]0;owned??gnp.exe? b??")


def test_a_hello() -> None:
    hello = clean_hello(Hello(1, "r", "t", b"m", ("/x",), NASTY, NASTY, NASTY))
    assert sound(hello.name, MAX_NAME) and sound(hello.agent, MAX_NAME) and sound(hello.site, MAX_SITE)
    assert (hello.run, hello.ticket, hello.membership, hello.addresses) == ("r", "t", b"m", ("/x",))
    plain = Hello(1, "r", "", b"", (), "Zoë's GPU 3 ✓ 節点", "shoal/1", "hall")
    assert clean_hello(plain) == plain


def test_messages_with_texts_for_people() -> None:
    for message in (Report(NASTY, Version(1, 1), 0, NASTY), Rejected("q", Version(1, 1), NASTY, True), Bye(NASTY, False)):
        clean = clean_message(message)
        assert type(clean) is type(message) and sound(clean.reason, MAX_REASON)
    assert len(clean_message(Report(NASTY, Version(1, 1), 0, "")).peer) <= 64
    for untouched in (Bye("the run is over", True), Renewal(b"\x1b"), Rejected("q", Version(1, 1), "full", True)):
        assert clean_message(untouched) is untouched
