"""What a node may not say of itself. Pure."""

from __future__ import annotations

from p2p.errors import Refusal
from p2p.protocol.generation import NodeStatus
from p2p.version import Version


def check_status(message: NodeStatus, newest: Version, checked: bool) -> None:
    """`checked`: whether what it makes is. What a node makes that keeps keys and values over an install is of no one version and
    cannot be: nobody may have it trained on unchecked by its own word.

    Refusal, fatal."""
    if message.version > newest:
        raise Refusal("it says that it serves a version that was not published", version=message.version, fatal=True)
    if checked and message.computes.keeps:
        raise Refusal(
            "it keeps keys and values over an install, so what it makes cannot be checked: it must be started with "
            "--kv-policy recompute, or the operator must answer for it (standing.trusted)", version=message.version, fatal=True,
        )  # fmt: skip
