"""What a person is told of a long download."""

from __future__ import annotations

from node.install.progress import TELL_S, DownloadProgress, spell_out_bytes


def test_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    progress = DownloadProgress("version 1.0", 100, 0.0)
    said = [progress.part(float(second), 10_000_000 * second) for second in range(1, 101)]
    told = [line for line in said if line]
    assert len(told) == 100 / TELL_S
    assert told[0] == "version 1.0: 10% is here (100.0 MB, 10.0 MB/s)"
    assert progress.done(100.0, 10**9) == "version 1.0 is here: 1.0 GB in 1 min 40 s"


def test_bytes_for_people() -> None:
    assert [spell_out_bytes(n) for n in (0, 999, 1500, 45_000_000, 2 * 10**9)] == ["0 B", "999 B", "1.5 kB", "45.0 MB", "2.0 GB"]
