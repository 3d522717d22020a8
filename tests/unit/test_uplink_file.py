"""What a host remembers of its uplink from one start to the next."""

from __future__ import annotations

import json

import pytest
import trio

from p2p.uplink_file import KEEP_S, UPLINK_FILE, keep_uplink, read_uplink, recall_uplink


class Sender:
    def __init__(self) -> None:
        self.found_uplink = 0.0
        self.expected: list[tuple[float, bool]] = []

    def expect_uplink(self, rate: float, *, told: bool) -> None:
        self.expected.append((rate, told))


async def test_a_rate_is_kept_when_it_is_known_and_recalled_at_the_next_start(tmp_path, autojump_clock) -> None:
    sender = Sender()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_uplink, tmp_path, sender)
        await trio.sleep(KEEP_S + 1)
        assert not (tmp_path / UPLINK_FILE).exists(), "nothing is known"
        sender.found_uplink = 5e6
        await trio.sleep(KEEP_S)
        assert read_uplink(tmp_path) == 5e6
        sender.found_uplink = 5.2e6
        await trio.sleep(KEEP_S)
        assert read_uplink(tmp_path) == 5e6, "hardly another"
        sender.found_uplink = 9e6
        nursery.cancel_scope.cancel()
    assert read_uplink(tmp_path) == 9e6, "the end is not a minute away"
    again = Sender()
    recall_uplink(tmp_path, again)
    assert again.expected == [(9e6, False)]


def test_what_its_owner_tells_counts_more_than_what_is_remembered(tmp_path) -> None:
    (tmp_path / UPLINK_FILE).write_text(json.dumps({"bytes_per_s": 1000}))
    sender = Sender()
    recall_uplink(tmp_path, sender, told_mbit=8.0)
    assert sender.expected == [(pytest.approx(0.95e6), True)]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"bytes_per_s": "fast"}', '{"bytes_per_s": -1}', '{"bytes_per_s": NaN}',
                                  '{"bytes_per_s": 1e30}', '{"bytes_per_s": null}', "[" * 100_000,
                                  '{"bytes_per_s": 1' + 400 * "0" + "}"])  # fmt: skip
def test_a_file_that_says_nothing_is_no_memory(tmp_path, text) -> None:
    (tmp_path / UPLINK_FILE).write_text(text)
    sender = Sender()
    recall_uplink(tmp_path, sender)
    assert not sender.expected


async def test_a_folder_that_cannot_be_written_costs_the_memory_alone(tmp_path, autojump_clock, caplog) -> None:
    sender = Sender()
    sender.found_uplink = 5e6
    with trio.move_on_after(KEEP_S + 1):
        await keep_uplink(tmp_path / "gone", sender)
    assert "cannot be written" in caplog.text
