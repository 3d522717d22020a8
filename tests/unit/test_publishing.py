"""What the trainer's client publishes beside each delta, and that every way through it ends at the same bits."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from learner.client.client import LearnerClient
from learner.client.connection import HeadConnection
from learner.client.messages import Begin, Begun, Ok, Resume, SealVersion, SegmentDone, Start
from learner.client.whole_states import KEPT, keep_whole, whole_state
from p2p.codec import decode_segment
from p2p.codec.classes import Changes
from p2p.layout import Layout, Segment
from p2p.version import Version
from p2p.weights.state import FlatState
from p2p.weights.store import ChunkFolder

SEGMENT = 1024
LAYOUT = Layout.build([("w", "bfloat16", (40, 30)), ("v", "float32", (200,))])


@dataclass
class Made:
    kind: str
    version: Version
    base: Version | None
    base_digest: bytes
    digest: bytes
    segments: list[bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.segments))


class Line(HeadConnection):
    """A head of a few lines in place of the socket."""

    def __init__(self, run_dir: Path, start: Start) -> None:
        super().__init__(socket.socket(socket.AF_UNIX))
        self.start, self._store = start, ChunkFolder(run_dir / "versions" / "chunks")
        self.made: list[Made] = []
        self.whole: set[int] = set()
        """steps whose states are to lie whole in the run's directory"""

    def ask(self, request: Any, expect: Any) -> Any:
        if isinstance(request, Resume):
            return self.start
        if isinstance(request, Begin):
            base = None if request.base is None else Version(request.base_epoch, request.base)
            version = Version(self.start.epoch, request.step)
            self.made.append(Made(request.kind, version, base, request.base_digest, b"", []))
            return Begun(b"m", 512)
        if isinstance(request, SealVersion):
            self.made[-1].digest = request.state_digest
            return Ok(keep_whole=self.made[-1].version.step in self.whole)
        return Ok()

    def tell(self, message: Any) -> None:
        assert isinstance(message, SegmentDone)
        digests = [message.digests[i : i + 32] for i in range(0, len(message.digests), 32)]
        self.made[-1].segments.append(b"".join(self._store.path(d).read_bytes() for d in digests))


class Head(LearnerClient):
    """The client at such a head."""

    def __init__(self, run_dir: Path, *, epoch: int = 1, step: int = 0, anchor_every: int = 100, squash_every: int = 0) -> None:
        self.line = Line(run_dir, Start(epoch, step, "", SEGMENT, anchor_every, squash_every))
        super().__init__(self.line, run_dir)
        self.made = self.line.made
        self.resume()

    def publish_state(self, step: int, state: FlatState, *, beside: bool = False) -> None:
        tensors = {t.name: (t.dtype, state.tensor(t.name).copy()) for t in LAYOUT.tensors}
        self.publish(step, tensors, wait=not beside)
        for _, bits in tensors.values():
            bits[...] = 0  # valid during the call, and no longer

    def ways(self) -> list[tuple[str, str, str]]:
        return [(m.kind, "" if m.base is None else str(m.base), str(m.version)) for m in self.made]


def state_of(step: int) -> FlatState:
    """A few more words of the first state changed with every step."""
    state, draw = FlatState.in_memory(LAYOUT), np.random.default_rng(1)
    for spec in LAYOUT.tensors:
        words = state.tensor(spec.name)
        words[...] = draw.integers(0, 2**16, words.shape)
        words.reshape(-1)[: 10 * step] += words.dtype.type(3)
    return state


def check(made: list[Made], states: dict[str, FlatState], layout: Layout = LAYOUT) -> None:
    """Each of them, applied to what its base has, gives what its version has."""
    for m in made:
        out, base = FlatState.in_memory(layout), states[str(m.base)] if m.base is not None else None
        assert m.base_digest == (base.digest() if base else b"")
        for segment, payload in zip(layout.segments(SEGMENT), m.segments, strict=True):
            decode_segment(payload, base.words(segment) if base else None, out.words(segment))
        assert out.digest() == m.digest == states[str(m.version)].digest()
        assert len({(o.version, o.kind, o.base) for o in made}) == len(made), "the head would equivocate"


def check_joining(made: list[Made], steps: list[int]) -> None:
    """Who has nothing gets to each of these versions with one anchor, or with one and at most an eighth of its bytes more."""
    anchors = [m for m in made if m.kind == "anchor"]
    assert anchors[0].version == made[0].version
    for step in steps:
        newest = [m for m in anchors if m.version.step <= step][-1]
        since = [m for m in made if m.version.step == step and m.base == newest.version]
        told = since[0].size if since else 0
        assert newest.version.step == step or (since and told <= newest.size / 8)
        # And none was made where that would have done: within reach of the first, the only one whose state is at hand.
        if newest.version.step == step != made[0].version.step and newest is anchors[1]:
            assert next(m for m in made if m.version.step == step and m.base == made[0].version).size > anchors[0].size / 8


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("anchor_every", "squash_every"), [(100, 0), (4, 0), (6, 3), (4, 4), (1, 2), (5, 1)])
def test_every_way_ends_at_the_same_bits(tmp_path: Path, anchor_every: int, squash_every: int, beside: bool) -> None:
    (tmp_path / "versions").mkdir()
    head = Head(tmp_path, anchor_every=anchor_every, squash_every=squash_every)
    states = {f"1.{step}": state_of(step) for step in range(14)}
    for step in range(14):
        head.publish_state(step, states[f"1.{step}"], beside=beside)
    head.finish()
    check(head.made, states)
    assert [m for m in head.ways() if m[0] == "delta"] == [("delta", f"1.{s - 1}", f"1.{s}") for s in range(1, 14)]
    check_joining(head.made, [s for s in range(14) if s % anchor_every == 0])
    spans = {(base, version) for kind, base, version in head.ways() if kind == "cumulative"}
    wanted = {("1.0", f"1.{s}") for s in range(2, 14) if s % anchor_every == 0}
    if squash_every > 1:
        wanted |= {(f"1.{s - squash_every}", f"1.{s}") for s in range(squash_every, 14, squash_every)}
    assert spans == wanted
    assert len(head._publications._states.free) <= 3, "states are used again"  # each is the size of a model
    head.close()


def test_a_later_epoch_tells_its_first_version_against_the_runs(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    head = Head(tmp_path)
    for step in (0, 1):
        head.publish_state(step, state_of(step))
    head.close()
    later = Head(tmp_path, epoch=2, step=1)
    later.publish_state(1, state_of(1))
    assert later.ways() == [("anchor", "", "2.1"), ("cumulative", "1.0", "2.1")]
    check(later.made, {"1.0": state_of(0), "2.1": state_of(1)})
    later.close()
    same = Head(tmp_path, epoch=3)
    same.publish_state(0, state_of(0))
    assert same.ways() == [("anchor", "", "3.0")], "the very bits of the first: nothing to tell"
    same.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "record", "layout"])
def test_a_first_version_that_was_damaged_is_begun_anew(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "versions"
    folder.mkdir()
    head = Head(tmp_path)
    head.publish_state(0, state_of(0))
    head.close()
    state, record = folder / "first.state", folder / "first.json"
    data = bytearray(state.read_bytes())
    match damage:
        case "flip":
            data[99] ^= 1
            state.write_bytes(data)
        case "cut":
            state.write_bytes(data[:-64])
        case "gone":
            state.unlink()
        case "record":
            record.write_text("{")
        case "layout":
            record.write_text(record.read_text().replace(LAYOUT.digest.hex(), "00"))
    later = Head(tmp_path, epoch=2, step=3)
    later.publish_state(3, state_of(3))
    later.publish_state(4, state_of(4))
    later.close()
    assert later.ways() == [("anchor", "", "2.3"), ("delta", "2.3", "2.4")]
    assert damage == "gone" or "is of no use" in caplog.text
    last = Head(tmp_path, epoch=3, step=4)
    last.publish_state(4, state_of(4))
    assert last.ways() == [("anchor", "", "3.4"), ("cumulative", "2.3", "3.4")]
    last.close()


def test_a_full_disk_stops_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "versions").mkdir()

    def full(*_: Any, **__: Any) -> FlatState:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FlatState, "create", full)
    head = Head(tmp_path, anchor_every=1)
    for step in range(3):
        head.publish_state(step, state_of(step))
    head.close()
    assert {kind for kind, _, _ in head.ways()} == {"anchor", "delta"}
    assert "cannot keep the run's first version" in caplog.text and not list((tmp_path / "versions").glob("first*"))


def test_what_goes_wrong_beside_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "versions").mkdir()
    head = Head(tmp_path)
    head.publish_state(0, state_of(0))

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(ChunkFolder, "put_trusted", full)
    head.publish_state(1, state_of(1), beside=True)
    with pytest.raises(OSError, match="no space left"):
        head.due(2)


# --- an adapter on a frozen base ---

ADAPTED = Layout.build(
    [("adapter.q.lora_A", "bfloat16", (4, 30)), ("adapter.q.lora_B", "bfloat16", (40, 4)), ("k", "bfloat16", (1500,)),
     ("q.weight", "bfloat16", (40, 30)), ("z", "float32", (2000,))]
)  # fmt: skip


def adapted(step: int) -> FlatState:
    """The base model; A random, B zero at first, and every value of both another with each step."""
    state = FlatState.in_memory(ADAPTED)
    for number, spec in enumerate(ADAPTED.tensors):
        of_adapter = spec.name.startswith("adapter.")
        if step == 0 and spec.name.endswith("lora_B"):
            continue
        draw = np.random.default_rng([number, step if of_adapter else 0])
        words = state.tensor(spec.name)
        words[...] = draw.integers(0, 2**16, words.shape)
    return state


def base_model() -> FlatState:
    """What a node makes of its own copy of the base model."""
    state = adapted(0)
    for spec in ADAPTED.tensors:
        if spec.name.startswith("adapter."):
            state.tensor(spec.name)[...] = 0
    return state


class Given:
    """A `WeightSource` of an adapter; says which segments were asked for."""

    layout = ADAPTED
    frozen = frozenset(spec.name for spec in ADAPTED.tensors if not spec.name.startswith("adapter."))

    def __init__(self) -> None:
        self.step, self.asked = 0, list[int]()

    def take(self, segment: Segment) -> Changes | np.ndarray:
        self.asked.append(segment.index)
        return adapted(self.step).words(segment).copy()

    def forget(self) -> None:
        """Nothing is remembered."""


@pytest.mark.parametrize("source", ["mapping", "source"])
@pytest.mark.parametrize(("anchor_every", "squash_every"), [(100, 0), (3, 2), (1, 3)])
def test_an_adapter_alone_is_told_and_every_way_ends_at_the_same_bits(
    tmp_path: Path, anchor_every: int, squash_every: int, source: str
) -> None:
    (tmp_path / "versions").mkdir()
    head = Head(tmp_path, anchor_every=anchor_every, squash_every=squash_every)
    states = {"0.0": base_model()} | {f"1.{step}": adapted(step) for step in range(10)}
    given = Given()
    for step in range(10):
        given.step, given.asked = step, []
        state = states[f"1.{step}"]
        table = {t.name: (t.dtype, state.tensor(t.name).copy()) for t in ADAPTED.tensors}
        if step and source == "mapping":
            for name in given.frozen:  # nobody reads these again
                table[name][1][...] = 0xFF
        head.publish(step, table if source == "mapping" else given)
        assert source == "mapping" or given.asked == ([0] if step else list(range(len(ADAPTED.segments(SEGMENT)))))
    check(head.made, states, ADAPTED)
    assert [str(m.version) for m in head.made if m.kind == "anchor"] == ["1.0"]
    check_joining(head.made, [s for s in range(10) if s % anchor_every == 0])
    whole = next(m.size for m in head.made if m.kind == "anchor")
    assert all(m.size < whole / 8 for m in head.made if m.base is not None)
    assert ("cumulative", "0.0", "1.0") in head.ways(), "who has the base model needs no anchor"
    assert all(("cumulative", "0.0", f"1.{s}") in head.ways() for s in range(1, 10) if s % anchor_every == 0)
    head.close()
    later = Head(tmp_path, epoch=2, step=9, anchor_every=2)
    states |= {f"2.{step}": adapted(step) for step in range(9, 14)}
    for step in range(9, 14):
        later.publish(step, {t.name: (t.dtype, states[f"2.{step}"].tensor(t.name)) for t in ADAPTED.tensors})
    check(later.made, states, ADAPTED)
    assert [m[1:] for m in later.ways() if m[0] == "anchor"] == [("", "2.9")]
    assert ("cumulative", "0.0", "2.9") in later.ways() and ("cumulative", "2.9", "2.11") in later.ways()
    later.close()


def test_states_that_the_head_asks_for_lie_there_whole_and_the_newest_few_alone(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    head = Head(tmp_path)
    (tmp_path / "versions" / "whole").mkdir()
    (tmp_path / "versions" / "whole" / "1-9.state.tmp").write_text("of a trainer that was killed")
    head.line.whole = {2, 3, 5, 8, 10}
    for step in range(12):
        head.publish_state(step, state_of(step), beside=step % 2 == 0)
    head.finish()
    kept = sorted(path.name for path in (tmp_path / "versions" / "whole").iterdir())
    assert kept == ["1-10.state", "1-5.state", "1-8.state"] and len(kept) == KEPT
    for step in (5, 8, 10):
        assert whole_state(tmp_path, Version(1, step)).read_bytes() == state_of(step).bytes.tobytes()
    head.close()


def test_a_state_that_cannot_be_kept_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "whole").write_text("no folder")
    head = Head(tmp_path)
    head.line.whole = {1}
    for step in range(3):
        head.publish_state(step, state_of(step))
    head.finish()
    check(head.made, {f"1.{step}": state_of(step) for step in range(3)})
    assert "state of version 1.1 is not kept whole" in caplog.text
    head.close()


def test_no_state_is_kept_where_the_disk_has_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4 * state.bytes.nbytes - 1))
    keep_whole(tmp_path, Version(1, 1), state.bytes)
    assert not whole_state(tmp_path, Version(1, 1)).exists()
