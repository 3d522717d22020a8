"""A version as text: EPOCH.STEP, and nothing else."""

from __future__ import annotations

import pytest

from p2p.version import Version


def test_a_version_is_read_as_it_is_written() -> None:
    for version in (Version(0, 0), Version(3, 12), Version(1, 10**12)):
        assert Version.parse(str(version)) == version


@pytest.mark.parametrize("text", [
    "", ".", "1", "1.", ".1", "1.2.3", "-1.2", "1.-2", "1. 2", "1.2\n", "a.b", "1.0x1", "1.1_0",
    "\u00b2.1", "1.\u00b2", "1.1\u00b2", "1.\u0664", "1.\u2460", "1.\uff11",
])  # fmt: skip
def test_anything_else_is_refused_in_plain_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a version: .*want EPOCH\.STEP"):
        Version.parse(text)
