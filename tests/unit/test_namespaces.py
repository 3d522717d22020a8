"""Where namespaces cannot be made, one line says why and what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.emulation.namespaces import NEEDED, call, why_no_namespaces
from p2p.errors import UsageError

EVERYTHING = (1 << 41) - 1


@pytest.mark.parametrize(
    ("root", "capabilities", "program", "words"),
    [
        (False, 0, "/sbin/ip", ("only root may", "sudo", "--cap-add NET_ADMIN")),
        (True, 0, "/sbin/ip", ("lacks CAP_NET_ADMIN and CAP_SYS_ADMIN", "--cap-add SYS_ADMIN")),
        (True, EVERYTHING & ~(1 << NEEDED["CAP_SYS_ADMIN"]), "/sbin/ip", ("lacks CAP_SYS_ADMIN:",)),
        (True, EVERYTHING, None, ("apt-get install iproute2",)),
    ],
)
def test_why_not(root: bool, capabilities: int, program: str | None, words: tuple[str, ...]) -> None:
    why = why_no_namespaces(root, capabilities, program)
    assert all(word in why for word in words) and "\n" not in why, why
    assert "ip netns" not in why


def test_root_with_all_of_it_may() -> None:
    assert why_no_namespaces(True, EVERYTHING, "/sbin/ip") == ""
    assert why_no_namespaces(True, -1, "/sbin/ip") == ""  # a system that does not say


def test_a_container_that_refuses_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ip = tmp_path / "ip"
    ip.write_text("#!/bin/sh\necho 'mount --make-shared /run/netns failed: Operation not permitted' >&2\nexit 1\n")
    ip.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UsageError, match=r"lets nobody make network namespaces here \(mount .*--cap-add"):
        call("ip", "netns", "add", "x")
