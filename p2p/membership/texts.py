"""What peers say in words, made fit for people where it comes in: no view and no log need do it again. Pure.

A name or a reason may hold escape sequences, characters that turn the direction of writing, line breaks, and a whole frame.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from p2p.printable import printable
from p2p.protocol.join import Hello

MAX_NAME = 128
"""Characters of a peer's name and of its program's. They go into every roster, which must fit a frame."""

MAX_SITE = 64
"""Characters of a site's name that count: the rest is cut off, so that a peer cannot fill memory with its site."""

MAX_REASON = 500
"""Characters of a reason that are kept of what a peer says, and that a peer is told. It may quote what the peer itself sent."""

MAX_PEER_TEXT = 64
"""Characters of a peer id that a message names: a real one has 52."""

MAX_WHY = 200
"""Characters that are kept of why two members have no link. A status has one such text for each of up to 500 pairs."""

_BOUNDS = {"reason": MAX_REASON, "peer": MAX_PEER_TEXT, "rests": MAX_NAME, "limits": MAX_NAME}
"""Fields of messages that people read, and their characters."""


def clean_hello(hello: Hello) -> Hello:
    """`hello` with names that can be shown anywhere."""
    return replace(
        hello, name=printable(hello.name, MAX_NAME), agent=printable(hello.agent, MAX_NAME), site=printable(hello.site, MAX_SITE)
    )


def clean_message(message: Any) -> Any:
    """`message` with texts for people that can be shown anywhere."""
    if _BOUNDS.keys().isdisjoint(message.__struct_fields__):
        return message
    found = {name: getattr(message, name) for name in _BOUNDS if isinstance(getattr(message, name, None), str)}
    clean = {name: printable(text, _BOUNDS[name]) for name, text in found.items()}
    return replace(message, **clean) if clean != found else message
