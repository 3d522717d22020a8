"""Chunks on disk: limits, pins, rot, crashes, and two processes on one folder."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import blake3
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2p.errors import Refusal, ShoalError
from p2p.limits import MAX_CHUNK
from p2p.weights.store import ChunkFolder, ChunkStore, clear_chunks


def chunk(number: int, size: int = 100) -> tuple[bytes, bytes]:
    data = number.to_bytes(4, "big") * (size // 4)
    return blake3.blake3(data).digest(), data


def test_what_was_put_is_got(tmp_path) -> None:
    store = ChunkStore(tmp_path)
    digest, data = chunk(1)
    assert store.get(digest) is None and not store.has(digest)
    store.put(digest, data)
    store.put(digest, data)
    assert store.get(digest) == data and store.has(digest) and store.total == 100


def test_only_what_hashes_and_fits(tmp_path) -> None:
    store = ChunkStore(tmp_path)
    digest, data = chunk(1)
    with pytest.raises(Refusal, match="does not hash") as refusal:
        store.put(digest, data[:-1] + b"x")
    assert refusal.value.fatal
    large = bytes(MAX_CHUNK + 1)
    with pytest.raises(Refusal, match="over the limit"):
        store.put(blake3.blake3(large).digest(), large)
    assert store.total == 0 and not store.has(digest)


def test_the_oldest_goes_first_and_pinned_ones_stay(tmp_path) -> None:
    store = ChunkStore(tmp_path, limit=300)
    made = [chunk(i) for i in range(5)]
    for digest, data in made[:3]:
        store.put(digest, data)
    store.pin([made[0][0]])
    store.put(*made[3])
    assert [store.has(d) for d, _ in made] == [True, False, True, True, False]
    store.pin([made[2][0], made[3][0]])
    with pytest.raises(ShoalError, match="full: 300 of 300 bytes, all of them pinned"):
        store.put(*made[4])
    assert store.total == 300 and not store.has(made[4][0])
    store.unpin([made[0][0]])
    store.put(*made[4])
    assert not store.has(made[0][0])


def test_pins_are_counted(tmp_path) -> None:
    store = ChunkStore(tmp_path)
    digest, data = chunk(1)
    store.put(digest, data)
    store.pin([digest, digest])
    store.unpin([digest])
    store.drop([digest])
    assert store.has(digest)
    store.unpin([digest, digest])
    store.drop([digest])
    assert not store.has(digest) and store.total == 0 and not store.path(digest).exists()


@pytest.mark.parametrize("damage", [
    lambda p: p.write_bytes(b"x" * 100), lambda p: p.write_bytes(p.read_bytes()[:50]), lambda p: p.write_bytes(b""),
    lambda p: p.unlink(),
], ids=["changed", "torn", "empty", "gone"])  # fmt: skip
def test_a_file_that_rots_is_missing_and_can_be_put_again(tmp_path, damage) -> None:
    store = ChunkStore(tmp_path)
    digest, data = chunk(1)
    store.put(digest, data)
    damage(store.path(digest))
    assert store.get(digest) is None and store.total == 0
    assert not store.has(digest)
    store.put(digest, data)
    assert store.get(digest) == data


def test_a_torn_file_of_a_crash_does_not_count_as_the_chunk(tmp_path) -> None:
    store = ChunkStore(tmp_path)
    digest, data = chunk(1)
    store.put(digest, data)
    store.path(digest).write_bytes(data[:10])
    again = ChunkStore(tmp_path)
    assert again.get(digest) is None
    again.put(digest, data)
    assert again.get(digest) == data and again.total == len(data)


@pytest.mark.parametrize("linked", [False, True])
def test_chunks_of_an_earlier_epoch_are_cleared_also_where_the_folder_is_a_link(tmp_path, linked: bool) -> None:
    root = there = tmp_path / "chunks"
    if linked:
        there = tmp_path / "other disk"
        there.mkdir()
        (there / "letters.txt").write_text("somebody's own")
        root.symlink_to(there)
    store = ChunkStore(root)
    for i in range(20):
        data = bytes([i]) * 100
        store.put(blake3.blake3(data).digest(), data)
    (next(there.glob("??")) / "tmp-1-abc").write_text("half a chunk")
    clear_chunks(root)
    assert [f.name for f in there.rglob("*")] == ["letters.txt"] * linked and root.is_symlink() == linked
    assert ChunkStore(root).total == 0
    clear_chunks(tmp_path / "nowhere")


def test_leftovers_of_a_crash_are_swept(tmp_path) -> None:
    store = ChunkStore(tmp_path)
    digest, data = chunk(1)
    store.put(digest, data)
    folder = store.path(digest).parent
    (folder / "tmp-123-abcdef").write_bytes(b"half")
    os.utime(folder / "tmp-123-abcdef", (1000, 1000))
    (folder / "tmp-124-abcdef").write_bytes(b"the other process is writing it")
    (folder / "beef").write_bytes(b"a name too short")
    (folder / "notes").mkdir()
    (tmp_path / "README").write_text("not ours")
    again = ChunkStore(tmp_path)
    assert again.total == 100 and again.get(digest) == data
    assert not (folder / "tmp-123-abcdef").exists() and (folder / "tmp-124-abcdef").exists()


def test_it_starts_with_what_is_there_oldest_first(tmp_path) -> None:
    store = ChunkStore(tmp_path)
    made = [chunk(i) for i in range(3)]
    for i, (digest, data) in enumerate(made):
        store.put(digest, data)
        os.utime(store.path(digest), (1000 - i, 1000 - i))
    again = ChunkStore(tmp_path, limit=300)
    again.put(*chunk(9))
    assert [again.has(d) for d, _ in made] == [True, True, False]


def test_two_processes_share_a_folder(tmp_path) -> None:
    trainer, head = ChunkStore(tmp_path), ChunkStore(tmp_path)
    digest, data = chunk(1)
    trainer.put_trusted(digest, data)
    assert head.has(digest) and head.get(digest) == data and head.total == 100
    head.drop([digest])
    assert trainer.get(digest) is None
    trainer.put_trusted(digest, data)
    head.drop([digest])
    trainer.put_trusted(digest, data)  # it thinks it has it, the other process dropped it
    assert head.get(digest) == data
    assert trainer.total == 100


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    store, folder = ChunkStore(tmp_path), ChunkFolder(tmp_path)

    def full(path: str, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("p2p.weights.store._write_file", full)
        for who in (store, folder):
            with pytest.raises(OSError, match="No space left"):
                who.put_trusted(*chunk(1))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()] and store.total == 0
    store.put(*chunk(1))
    assert store.get(chunk(1)[0]) == chunk(1)[1]


def test_a_chunk_that_cannot_be_read_is_missing_and_a_want_of_handles_is_not_its_fault(tmp_path, monkeypatch) -> None:
    store = ChunkStore(tmp_path)
    digest, data = chunk(1)
    store.put(digest, data)
    code = errno.EMFILE

    def broken(path: str) -> bytes:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as disk:
        disk.setattr("p2p.weights.store._read_file", broken)
        with pytest.raises(OSError, match="Too many open files"):
            store.get(digest)
        assert store.has(digest)
        code = errno.EIO
        assert store.get(digest) is None
        assert not store.has(digest) and store.total == 0
    store.put(digest, data)
    assert store.get(digest) == data


def test_room_is_made_without_looking_at_every_chunk(tmp_path) -> None:
    store = ChunkStore(tmp_path, limit=10_000_000)
    pinned = [i.to_bytes(32, "big") for i in range(100_000)]
    store.pin(pinned)
    for digest in pinned:
        store._note(digest, 100)  # counted, without a hundred thousand files
    for i in range(3):
        with pytest.raises(ShoalError, match="all of them pinned"):
            store.put(*chunk(i))
    store.unpin(pinned[:2])
    start = time.perf_counter()
    for i in range(200):
        store.put(*chunk(i))
    assert time.perf_counter() - start < 1.0  # listing the store for each took 10 ms and more
    assert store.total == 10_000_000 and len(store._loose) == 2  # memory


def test_who_only_writes_remembers_nothing(tmp_path) -> None:
    folder, head = ChunkFolder(tmp_path), ChunkStore(tmp_path)
    folder.put_trusted(*chunk(1))
    before = os.stat(folder.path(chunk(1)[0])).st_ino
    folder.put_trusted(*chunk(1))
    assert os.stat(folder.path(chunk(1)[0])).st_ino == before  # there already: not written again
    assert vars(folder) == {"root": tmp_path, "_text": str(tmp_path)}
    assert head.get(chunk(1)[0]) == chunk(1)[1]
    head.drop([chunk(1)[0]])
    folder.put_trusted(*chunk(1))
    assert head.has(chunk(1)[0])


class StoreMachine(RuleBasedStateMachine):
    """Against a model: a set of chunks and their pins. What is pinned is there; the total is what is on the disk."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.store = ChunkStore(Path(self.folder.name), limit=600)
        self.pins: dict[int, int] = {}

    numbers = st.integers(0, 11)

    @rule(n=numbers)
    def put(self, n: int) -> None:
        try:
            self.store.put(*chunk(n))
        except ShoalError:
            held = sum(self.store.has(chunk(i)[0]) for i in self.pins)
            assert held * 100 + 100 > 600
        else:
            assert self.store.get(chunk(n)[0]) == chunk(n)[1]

    @rule(n=numbers)
    def pin(self, n: int) -> None:
        if self.store.has(chunk(n)[0]):
            self.store.pin([chunk(n)[0]])
            self.pins[n] = self.pins.get(n, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data) -> None:
        n = data.draw(st.sampled_from(sorted(self.pins)))
        self.store.unpin([chunk(n)[0]])
        self.pins[n] -= 1
        if not self.pins[n]:
            del self.pins[n]

    @rule(n=numbers)
    def drop(self, n: int) -> None:
        self.store.drop([chunk(n)[0]])

    @invariant()
    def pinned_ones_are_there_and_the_total_is_right(self) -> None:
        assert all(self.store.get(chunk(n)[0]) is not None for n in self.pins)
        files = [f for folder in self.store.root.iterdir() for f in folder.iterdir()]
        assert self.store.total == sum(f.stat().st_size for f in files) <= 600
        # An index that the store keeps beside its books.
        assert set(self.store._loose) == set(self.store._sizes) - set(self.store._pins)

    def teardown(self) -> None:
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestStore = StoreMachine.TestCase
