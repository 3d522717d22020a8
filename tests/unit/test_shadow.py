"""The node's shadow: only whole, verified versions are ever held, whatever arrives and whenever it dies."""

from __future__ import annotations

import builtins
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.install.shadow import Shadow
from node.install.staging import Staging
from p2p.codec import encode_segment
from p2p.errors import Refusal, UsageError
from p2p.layout import Layout
from p2p.version import Version
from p2p.weights.state import FlatState

LAYOUT = Layout.build(
    [("a", "bfloat16", (40, 9)), ("b", "bfloat16", (33,)), ("c", "float32", (100,)), ("z", "float32", (0,))]
)
CUT = 256
RUN = "run-1"


def state_of(seed: int) -> FlatState:
    """Version (1, seed): every seed changes "a"; only even seeds change "c"; "b" stays."""
    state = FlatState.in_memory(LAYOUT)
    state.write_tensor("a", np.random.default_rng(seed).integers(0, 2**16, (40, 9), dtype=np.uint16))
    state.write_tensor("b", np.arange(33, dtype=np.uint16))
    state.write_tensor("c", np.full(100, seed // 2, np.uint32))
    return state


def payloads(new: FlatState, base: FlatState | None) -> list[bytes]:
    return [encode_segment(new.words(s), base.words(s) if base else None)[0] for s in LAYOUT.segments(CUT)]


def stage(shadow: Shadow, step: int, base: int | None) -> Staging:
    new, old = state_of(step), None if base is None else state_of(base)
    kind = "anchor" if base is None else "delta"
    staging = shadow.begin(
        Version(1, step),
        kind,
        LAYOUT,
        None if base is None else Version(1, base),
        old.digest() if old else None,
        segment_bytes=CUT,
    )
    for segment, payload in zip(staging.segments, payloads(new, old), strict=True):
        staging.write(segment, payload)
    staging.finish(new.tensor_digests(), new.digest())
    return staging


def holding(directory: Path, step: int) -> Shadow:
    shadow = Shadow.open(directory, RUN)
    shadow.commit(stage(shadow, step, None))
    return shadow


def assert_holds(shadow: Shadow, step: int) -> None:
    assert shadow.version == Version(1, step) and shadow.digest == state_of(step).digest()
    file = shadow.state_file()
    assert FlatState.open(file.path, file.layout).bytes.tobytes() == state_of(step).bytes.tobytes()


def test_anchor_deltas_and_reopening(tmp_path: Path) -> None:
    shadow = Shadow.open(tmp_path / "new" / "shadow", RUN)
    assert (shadow.version, shadow.digest) == (None, None)
    with pytest.raises(RuntimeError, match="holds no version"):
        shadow.state_file()
    shadow.commit(stage(shadow, 1, None))
    paths = set()
    for step in range(2, 6):
        shadow.commit(stage(shadow, step, step - 1))
        assert_holds(shadow, step)
        paths.add(shadow.state_file().path.name)
    assert paths == {"a.state", "b.state"}
    again = Shadow.open(tmp_path / "new" / "shadow", RUN)
    assert_holds(again, 5)
    assert again.state_file().layout == LAYOUT
    again.commit(stage(again, 6, 5))
    assert_holds(again, 6)


def test_finish_names_the_tensors_that_differ(tmp_path: Path) -> None:
    shadow = Shadow.open(tmp_path, RUN)
    new = state_of(1)

    def finish(step: int, base: int | None) -> tuple[str, ...] | None:
        new = state_of(step)
        staging = stage(shadow, step, base)
        file = staging.finish(new.tensor_digests(), new.digest())
        assert file.version == Version(1, step) and file.path == staging.state.path
        shadow.commit(staging)
        return file.changed

    assert new.digest() == state_of(1).digest()
    assert [finish(1, None), finish(2, 1), finish(3, 2), finish(5, None)] == [None, ("a", "c"), ("a",), ("a", "c")]


def test_a_wrong_base_or_an_old_version_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    shadow = Shadow.open(tmp_path, RUN)
    with pytest.raises(Refusal, match=r"unknown base: delta is against version 1\.1 .* the shadow holds nothing"):
        shadow.begin(Version(1, 2), "delta", LAYOUT, Version(1, 1), state_of(1).digest())
    shadow.commit(stage(shadow, 1, None))
    shadow.commit(stage(shadow, 2, 1))
    kept = stage(shadow, 3, 2)
    with pytest.raises(Refusal, match=r"unknown base: delta is against version 1\.3 .* holds version 1\.2") as refused:
        shadow.begin(Version(1, 4), "delta", LAYOUT, Version(1, 3), state_of(3).digest())
    assert refused.value.version == Version(1, 4)
    with pytest.raises(Refusal, match="no digest"):
        shadow.begin(Version(1, 4), "delta", LAYOUT, Version(1, 2), None)
    with pytest.raises(Refusal, match=r"not newer than version 1\.2"):
        shadow.begin(Version(1, 2), "delta", LAYOUT, Version(1, 1), state_of(1).digest())
    other = Layout.build([("a", "bfloat16", (40, 9))])
    with pytest.raises(Refusal, match="tensor table is not its base's"):
        shadow.begin(Version(1, 4), "delta", other, Version(1, 2), shadow.digest)
    with pytest.raises(ValueError, match="anchor, delta or cumulative"):
        shadow.begin(Version(1, 4), "xor", LAYOUT)
    shadow.commit(kept)  # none of these refusals was a begin
    assert_holds(shadow, 3)


def test_segments_come_once_in_any_order_and_all_of_them(tmp_path: Path) -> None:
    shadow = holding(tmp_path, 1)
    new, base = state_of(2), state_of(1)
    staging = shadow.begin(Version(1, 2), "delta", LAYOUT, Version(1, 1), base.digest(), segment_bytes=CUT)
    todo = list(zip(staging.segments, payloads(new, base), strict=True))
    first, payload = todo[0]
    with pytest.raises(Refusal, match="segment 0: unknown coding 99") as refused:
        staging.write(first, b"\x63")
    assert refused.value.version == Version(1, 2)
    for segment, payload in reversed(todo[1:]):
        staging.write(segment, payload)
    with pytest.raises(Refusal, match="segment 1 came twice"):
        staging.write(*todo[1])
    with pytest.raises(Refusal, match=rf"1 of {len(todo)} segments missing, the first is 0"):
        staging.finish(new.tensor_digests(), new.digest())
    for alien in (replace(first, stop=first.stop + 64), replace(first, index=-1), replace(first, index=99)):
        with pytest.raises(Refusal, match="is not one of this version's"):
            staging.write(alien, payload)
    with pytest.raises(RuntimeError, match="not finished"):
        shadow.commit(staging)
    staging.write(*todo[0])
    staging.finish(new.tensor_digests(), new.digest())
    with pytest.raises(Refusal, match="staging is over"):
        staging.write(*todo[0])
    assert_holds(shadow, 1)
    shadow.commit(staging)
    assert_holds(shadow, 2)
    with pytest.raises(RuntimeError):
        shadow.commit(staging)
    staging.discard()
    assert_holds(shadow, 2)


def test_a_seal_that_does_not_match_is_refused_by_tensor(tmp_path: Path) -> None:
    shadow = holding(tmp_path, 1)
    new, base = state_of(2), state_of(1)

    def written(actual: FlatState) -> Staging:
        staging = shadow.begin(Version(1, 2), "delta", LAYOUT, Version(1, 1), base.digest(), segment_bytes=CUT)
        for segment, payload in zip(staging.segments, payloads(actual, base), strict=True):
            staging.write(segment, payload)
        return staging

    wrong = state_of(2)
    wrong.tensor("b")[32] ^= 1
    digests = new.tensor_digests()
    with pytest.raises(Refusal, match="tensor 'b' differs"):
        written(wrong).finish(digests, new.digest())
    with pytest.raises(Refusal, match="state digest"):
        written(new).finish(digests, bytes(32))
    with pytest.raises(Refusal, match="3 tensor digests for 4 tensors"):
        written(new).finish(digests[:-1], new.digest())
    wrong = state_of(2)
    wrong.bytes[LAYOUT.by_name["b"].stop] = 1
    assert wrong.digest() == new.digest()
    staging = written(wrong)
    with pytest.raises(Refusal, match="between tensors"):
        staging.finish(digests, new.digest())
    with pytest.raises(RuntimeError, match="not finished"):
        shadow.commit(staging)
    assert_holds(Shadow.open(tmp_path, RUN), 1)


def test_only_one_staging_and_a_dropped_one_does_no_harm(tmp_path: Path) -> None:
    shadow = holding(tmp_path, 1)
    old = shadow.begin(Version(1, 2), "delta", LAYOUT, Version(1, 1), shadow.digest, segment_bytes=CUT)
    late = old.state.words(old.segments[0])  # what a thread that is still decoding holds
    staging = stage(shadow, 3, 1)
    late[:] = 0xFFFF
    old.discard()
    with pytest.raises(Refusal, match="staging is over"):
        old.write(old.segments[0], payloads(state_of(2), state_of(1))[0])
    with pytest.raises(Refusal, match="staging is over"):
        old.finish(state_of(2).tensor_digests(), state_of(2).digest())
    shadow.commit(staging)
    assert_holds(Shadow.open(tmp_path, RUN), 3)


def test_a_mapped_version_outlives_its_turn(tmp_path: Path) -> None:
    """Who still maps a version reads that version until the one after it is committed, and until the next begins at the least."""
    shadow = holding(tmp_path, 1)
    file = shadow.state_file()
    engine = FlatState.open(file.path, file.layout)
    staging = stage(shadow, 2, 1)
    assert engine.bytes.tobytes() == state_of(1).bytes.tobytes()
    shadow.commit(staging)
    assert engine.bytes.tobytes() == state_of(1).bytes.tobytes()


def test_an_engine_that_got_ahead_keeps_its_file(tmp_path: Path) -> None:
    """The engine took version 3 and the shadow could not: later stagings leave that file alone, whatever they do."""
    shadow = holding(tmp_path, 1)
    shadow.commit(stage(shadow, 2, 1))
    ahead = stage(shadow, 3, 2)
    assert ahead.state.path is not None
    engine = FlatState.open(ahead.state.path, LAYOUT)
    for step in (4, 5):
        shadow.commit(stage(shadow, step, 2 if step == 4 else 4))
        assert_holds(Shadow.open(tmp_path, RUN), step)
    assert engine.bytes.tobytes() == state_of(3).bytes.tobytes()


def test_what_did_not_change_is_neither_written_nor_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two turns both files hold the frozen part; from then on only what changes is touched, and checked as ever."""
    frozen = Layout.build([("a", "bfloat16", (200,)), ("base", "bfloat16", (4000,)), ("other", "bfloat16", (900,))])

    def version(step: int) -> FlatState:
        state = FlatState.in_memory(frozen)
        for seed, spec in enumerate(frozen.tensors):
            draw = np.random.default_rng([seed, step if spec.name == "a" else 0])
            state.write_tensor(spec.name, draw.integers(0, 2**16, spec.shape, dtype=np.uint16))
        return state

    def staged(step: int) -> Staging:
        new, old = version(step), version(step - 1) if step else None
        base = old.digest() if old else None
        staging = shadow.begin(Version(1, step), "delta" if step else "anchor", frozen, None, base, segment_bytes=512)
        hashed.clear()
        for segment in staging.segments:
            payload = encode_segment(new.words(segment), old.words(segment) if old else None)[0]
            staging.write(segment, payload)
        return staging

    shadow = Shadow.open(tmp_path, RUN)
    inodes: list[int] = []
    hashed: list[int] = []
    real = FlatState.tensor_digest

    def counted(self: FlatState, index: int) -> bytes:
        hashed.append(index)
        return real(self, index)

    monkeypatch.setattr(FlatState, "tensor_digest", counted)
    for step in range(6):
        new = version(step)
        digests, digest = new.tensor_digests(), new.digest()
        staging = staged(step)
        assert hashed == ([0] if step else [0, 1, 2])
        file = staging.finish(digests, digest)
        shadow.commit(staging)
        inodes.append(file.path.stat().st_ino)
        assert file.changed == (("a",) if step else None)
        assert file.path.read_bytes() == version(step).bytes.tobytes()
        assert staging.changed == ({0} if step else set(range(len(staging.segments))))
    assert len(set(inodes)) == 2
    # What a try that failed has written is not taken for the held state's bytes.
    def damaged(payload: bytes, base: np.ndarray | None, out: np.ndarray) -> None:
        out[:] = 7
        raise Refusal("cut short")

    new, old = version(6), version(5)
    staging = shadow.begin(Version(1, 6), "delta", frozen, None, old.digest(), segment_bytes=512)
    with monkeypatch.context() as patched, pytest.raises(Refusal, match="cut short"):
        patched.setattr("node.install.staging.decode_segment", damaged)
        staging.write(staging.segments[-2], b"damaged")
    for segment in staging.segments:
        staging.write(segment, encode_segment(new.words(segment), old.words(segment))[0])
    file = staging.finish(new.tensor_digests(), new.digest())
    shadow.commit(staging)
    assert file.path.read_bytes() == new.bytes.tobytes()
    assert Shadow.open(tmp_path, RUN).digest == new.digest()
    # A seal that says otherwise of an untouched tensor is refused.
    staging = staged(7)
    wrong = version(7).tensor_digests()
    wrong[2] = b"\1" * 16
    with pytest.raises(Refusal, match="'other' differs"):
        staging.finish(wrong, version(7).digest())


def test_discard_leaves_the_held_version_and_no_file(tmp_path: Path) -> None:
    shadow = holding(tmp_path, 1)
    staging = stage(shadow, 2, 1)
    staging.discard()
    staging.discard()
    with pytest.raises(RuntimeError):
        shadow.commit(staging)
    assert_holds(shadow, 1)
    assert len(list(tmp_path.glob("*.state"))) == 1
    shadow.commit(stage(shadow, 2, 1))
    assert_holds(shadow, 2)


def test_adopt_only_the_same_bits(tmp_path: Path) -> None:
    shadow = Shadow.open(tmp_path, RUN)
    with pytest.raises(Refusal, match="cannot adopt"):
        shadow.adopt(Version(1, 1), state_of(1).digest())
    shadow.commit(stage(shadow, 1, None))
    orphan = stage(shadow, 2, 1)
    with pytest.raises(Refusal, match=r"not the digest of version 1\.1"):
        shadow.adopt(Version(2, 1), state_of(2).digest())
    with pytest.raises(Refusal, match="older than"):
        shadow.adopt(Version(0, 9), state_of(1).digest())
    shadow.adopt(Version(2, 1), state_of(1).digest())
    assert shadow.version == Version(2, 1) == Shadow.open(tmp_path, RUN).version
    with pytest.raises(RuntimeError, match="dropped"):
        shadow.commit(orphan)


def test_a_new_layout_comes_as_an_anchor(tmp_path: Path) -> None:
    shadow = holding(tmp_path, 1)
    layout = Layout.build([("n", "uint8", (5,))])
    new = FlatState.in_memory(layout)
    staging = shadow.begin(Version(1, 2), "anchor", layout)
    staging.write(staging.segments[0], encode_segment(new.words(staging.segments[0]), None)[0])
    assert staging.finish(new.tensor_digests(), new.digest()).changed is None
    shadow.commit(staging)
    assert shadow.state_file().layout == layout
    assert Shadow.open(tmp_path, RUN).state_file().layout == layout


def test_another_run_is_the_users_mistake_and_nothing_is_touched(tmp_path: Path) -> None:
    holding(tmp_path, 1)
    with pytest.raises(UsageError, match=r"'run-1'.*'run-2'"):
        Shadow.open(tmp_path, "run-2")
    assert_holds(Shadow.open(tmp_path, RUN), 1)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _set(key: str, value: object) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        record = json.loads((directory / "state.json").read_text())
        record[key] = value
        (directory / "state.json").write_text(json.dumps(record))

    return damage


DAMAGE = {
    "bit in a tensor": lambda d: _flip(d / "a.state", 5),
    "bit in the padding": lambda d: _flip(d / "a.state", LAYOUT.nbytes - 1),
    "cut": lambda d: os.truncate(d / "a.state", 100),
    "gone": lambda d: (d / "a.state").unlink(),
    "no layout": lambda d: (d / "a.layout.msgpack").unlink(),
    "layout bit": lambda d: _flip(d / "a.layout.msgpack", 4),
    "layout cut": lambda d: os.truncate(d / "a.layout.msgpack", 4),
    "layout empty": lambda d: os.truncate(d / "a.layout.msgpack", 0),
    "record cut": lambda d: os.truncate(d / "state.json", 20),
    "record empty": lambda d: os.truncate(d / "state.json", 0),
    "record not text": lambda d: (d / "state.json").write_bytes(b"\xff\xfe"),
    "record a list": lambda d: (d / "state.json").write_text("[]"),
    "slot": _set("slot", "../x"),
    "digest": _set("digest", "00"),
    "digest type": _set("digest", 5),
    "version": _set("version", "new"),
    "version type": _set("version", 3),
    "format": _set("format", 2),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_never_trusted(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holding(tmp_path, 1)
    DAMAGE[what](tmp_path)
    with caplog.at_level(logging.WARNING):
        shadow = Shadow.open(tmp_path, RUN)
    assert shadow.version is None and "thrown away" in caplog.text
    assert list(tmp_path.iterdir()) == []
    shadow.commit(stage(shadow, 2, None))
    assert_holds(Shadow.open(tmp_path, RUN), 2)


def test_a_full_disk_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = holding(tmp_path, 1)
    kept = stage(shadow, 2, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(Refusal, match="do not fit"):
            stage(shadow, 3, 1)
    shadow.commit(kept)  # refused before anything was dropped

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    again = Shadow.open(tmp_path, RUN)
    with pytest.raises(Refusal, match="no room"):
        stage(again, 3, 2)
    assert_holds(again, 2)
    assert_holds(Shadow.open(tmp_path, RUN), 2)


def test_the_turn_of_a_file_that_is_there_takes_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = holding(tmp_path, 1)
    shadow.commit(stage(shadow, 2, 1))

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    shadow.commit(stage(shadow, 3, 2))
    assert_holds(shadow, 3)


class Crash(BaseException):
    """The process is gone: no handler may go on."""


FS_CALLS = [
    (os, "replace"),
    (os, "fsync"),
    (os, "unlink"),
    (os, "posix_fallocate"),
    (os, "ftruncate"),
    (builtins, "open"),
]


def _run_until(directory: Path, operation: int, after: bool) -> bool:
    """Commit version 2 over version 1, dying at the given file operation; False when there was none so late."""
    count = 0
    shadow = Shadow.open(directory, RUN)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in FS_CALLS:
            real = getattr(module, name)

            def wrapped(*args, real=real, **kwargs):
                nonlocal count
                count += 1
                if count == operation and not after:
                    raise Crash
                mine = count
                try:
                    return real(*args, **kwargs)
                finally:
                    if mine == operation:
                        raise Crash

            patch.setattr(module, name, wrapped)
        try:
            shadow.commit(stage(shadow, 2, 1))
        except Crash:
            return True
    return False


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_file_operation_leaves_one_whole_version(after: bool, tmp_path: Path) -> None:
    seen = []
    for operation in range(1, 100):
        directory = tmp_path / str(operation)
        holding(directory, 1)
        if not _run_until(directory, operation, after):
            break
        shadow = Shadow.open(directory, RUN)
        assert shadow.version is not None
        assert_holds(shadow, shadow.version.step)
        seen.append(shadow.version.step)
        if shadow.version.step == 1:
            shadow.commit(stage(shadow, 2, 1))
        shadow.commit(stage(shadow, 3, 2))
        assert_holds(Shadow.open(directory, RUN), 3)
    assert len(seen) >= 8 and sorted(seen) == seen and set(seen) == {1, 2}, seen


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failing_disk_keeps_memory_and_disk_in_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nth in range(1, 8):
        directory = tmp_path / str(nth)
        shadow = holding(directory, 1)
        staging, real, count = stage(shadow, 2, 1), getattr(os, name), 0

        def fails(*args, real=real, nth=nth):
            nonlocal count
            count += 1
            if count == nth:
                raise OSError(5, "I/O error")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            try:
                shadow.commit(staging)
            except OSError:
                assert shadow.version in (Version(1, 1), Version(1, 2))
            else:
                assert count < nth
        assert shadow.version is not None
        assert_holds(shadow, shadow.version.step)
        if shadow.version == Version(1, 1):
            shadow.commit(staging)  # the disk is well again
        assert_holds(Shadow.open(directory, RUN), 2)


CHILD = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from tests.unit.test_shadow import RUN, stage
from node.install.shadow import Shadow
shadow = Shadow.open(Path({directory!r}), RUN)
step = shadow.version.step if shadow.version else 0
while True:
    shadow.commit(stage(shadow, step + 1, step or None))
    step += 1
    print(step, flush=True)
"""


def test_sigkill_in_mid_work_leaves_a_whole_version(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    shadow_dir, last = tmp_path / "shadow", 0
    code = CHILD.format(path=[root], directory=str(shadow_dir))
    for lines in (3, 8):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
        assert child.stdout is not None
        for _ in range(lines):
            last = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        last = int(rest[-1]) if rest else last
        shadow = Shadow.open(shadow_dir, RUN)
        assert shadow.version in (Version(1, last), Version(1, last + 1))
        assert_holds(shadow, shadow.version.step)
        last = shadow.version.step


def test_segments_decode_in_many_threads(tmp_path: Path) -> None:
    shadow = holding(tmp_path, 1)
    new, base = state_of(2), state_of(1)
    staging = shadow.begin(Version(1, 2), "delta", LAYOUT, Version(1, 1), base.digest(), segment_bytes=64)
    gate = threading.Barrier(4)
    todo = [(s, encode_segment(new.words(s), base.words(s))[0]) for s in staging.segments]

    def work(lane: int) -> int:
        gate.wait(5)
        refused = 0
        for segment, payload in todo:
            try:
                staging.write(segment, payload)
            except Refusal:
                refused += 1
        return refused

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) == 3 * len(todo), "each segment is taken by exactly one"
    staging.finish(new.tensor_digests(), new.digest())
    shadow.commit(staging)
    assert_holds(shadow, 2)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_history_holds_exactly_what_was_committed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random begins, writes, wrong bases, drops and restarts against a model of two integers."""
    directory = tmp_path_factory.mktemp("s")
    shadow, held, newest = Shadow.open(directory, RUN), 0, 0
    actions = st.sampled_from(["anchor", "delta", "wrong", "half", "discard", "reopen"])
    for action in data.draw(st.lists(actions, max_size=12)):
        newest += 1
        if action == "anchor" or (action == "delta" and held):
            shadow.commit(stage(shadow, newest, held if action == "delta" else None))
            held = newest
        elif action == "wrong":
            with pytest.raises(Refusal, match="unknown base"):
                stage(shadow, newest, newest + 1)
        elif action in ("half", "discard"):
            base = state_of(held) if held and data.draw(st.booleans()) else None
            kind, digest = ("delta", base.digest()) if base else ("anchor", None)
            cut = data.draw(st.sampled_from([CUT, 2 * CUT]))
            staging = shadow.begin(Version(1, newest), kind, LAYOUT, None, digest, segment_bytes=cut)
            words = [state.words(staging.segments[1]) for state in (state_of(newest), base) if state]
            staging.write(staging.segments[1], encode_segment(words[0], words[1] if base else None)[0])
            with pytest.raises(Refusal, match="missing"):
                staging.finish(state_of(newest).tensor_digests(), state_of(newest).digest())
            if action == "discard":
                staging.discard()
        elif action == "reopen":
            shadow = Shadow.open(directory, RUN)
        if held:
            assert_holds(shadow, held)
        else:
            assert shadow.version is None


@st.composite
def installs(draw: st.DrawFn) -> list[tuple[int, int, str, list[int]]]:
    """(base, step, what goes wrong, an order of segments): installs of a chain 1 to 5, singly and over several versions."""
    count = len(LAYOUT.segments(CUT))
    wrongs = st.sampled_from(["", "", "", "twice", "half", "foreign", "other payload", "seal"])
    pairs = st.tuples(st.integers(1, 4), st.integers(2, 5)).filter(lambda p: p[0] < p[1])
    return [(*draw(pairs), draw(wrongs), draw(st.permutations(range(count)))) for _ in range(draw(st.integers(1, 10)))]


@given(installs())
@settings(max_examples=150, deadline=None)
def test_a_chain_is_applied_once_in_order_and_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, todo: list[tuple[int, int, str, list[int]]]
) -> None:
    """Deltas and cumulative ones come in any order, again, half, with another's payloads: what is held has the digest of
    just the version that it is called, and moves only along a delta whose base it is."""
    shadow, held = holding(tmp_path_factory.mktemp("s"), 1), 1
    for base, step, wrong, order in todo:
        old, new = state_of(base), state_of(step)
        kind = "delta" if step == base + 1 else "cumulative"
        if base != held or step <= held:  # out of order, or what is installed already
            with pytest.raises(Refusal, match=r"unknown base|not newer than"):
                shadow.begin(Version(1, step), kind, LAYOUT, Version(1, base), old.digest(), segment_bytes=CUT)
            assert_holds(shadow, held)
            continue
        staging = shadow.begin(Version(1, step), kind, LAYOUT, Version(1, base), old.digest(), segment_bytes=CUT)
        mine, others = payloads(new, old), payloads(state_of(step + 2), old)
        seal = (new.tensor_digests(), new.digest())
        if wrong == "seal":
            seal = (old.tensor_digests(), old.digest())
        try:
            for i in order[1:] if wrong == "half" else order:
                foreign = wrong in ("foreign", "other payload") and i == 0
                staging.write(staging.segments[i], others[i] if foreign else mine[i])
                if wrong == "twice":
                    with pytest.raises(Refusal, match="came twice"):
                        staging.write(staging.segments[i], mine[i])
            staging.finish(*seal)
        except Refusal:
            assert wrong in ("half", "foreign", "other payload", "seal")
            with pytest.raises(RuntimeError):
                shadow.commit(staging)
            staging.discard()
        else:
            assert wrong in ("", "twice")
            shadow.commit(staging)
            held = step
        assert_holds(shadow, held)
        assert_holds(Shadow.open(shadow.directory, RUN), held)


def test_a_state_from_elsewhere_is_held_like_any_other(tmp_path: Path) -> None:
    shadow = Shadow.open(tmp_path, RUN)

    def fails(state: FlatState) -> None:
        raise UsageError("no such tensor")

    with pytest.raises(UsageError):
        shadow.fill(Version(0, 0), LAYOUT, fails)
    assert shadow.version is None and not list(tmp_path.glob("*.state"))
    shadow.fill(Version(0, 0), LAYOUT, lambda state: np.copyto(state.bytes, state_of(1).bytes))
    assert shadow.version == Version(0, 0) and shadow.digest == state_of(1).digest()
    shadow = Shadow.open(tmp_path, RUN)
    shadow.commit(stage(shadow, 2, 1))
    assert_holds(shadow, 2)
    with pytest.raises(Refusal, match="not newer"):
        shadow.fill(Version(0, 0), LAYOUT, fails)
