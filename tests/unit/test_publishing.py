"""What the trainer's client publishes beside each delta, and that every way through it ends at the same bits."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.client.client import LearnerClient
from learner.client.messages import Begin, Begun, Ok, Resume, SealVersion, SegmentDone, Start
from p2p.codec import decode_segment
from p2p.layout import Layout
from p2p.version import Version
from p2p.weights.state import FlatState

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


class Head(LearnerClient):
    """The client, with a head of a few lines in place of the socket."""

    def __init__(self, run_dir: Path, *, epoch: int = 1, step: int = 0, anchor_every: int = 100, squash_every: int = 0) -> None:
        super().__init__(socket.socket(socket.AF_UNIX), run_dir)
        self.start = Start(epoch, step, "", SEGMENT, anchor_every, squash_every)
        self.made: list[Made] = []
        self.resume()

    def _ask(self, request: Any, expect: Any) -> Any:
        if isinstance(request, Resume):
            return self.start
        if isinstance(request, Begin):
            base = None if request.base is None else Version(request.base_epoch, request.base)
            version = Version(self.start.epoch, request.step)
            self.made.append(Made(request.kind, version, base, request.base_digest, b"", []))
            return Begun(b"m", 512)
        if isinstance(request, SealVersion):
            self.made[-1].digest = request.state_digest
        return Ok()

    def _tell(self, message: Any) -> None:
        assert isinstance(message, SegmentDone)
        digests = [message.digests[i : i + 32] for i in range(0, len(message.digests), 32)]
        self.made[-1].segments.append(b"".join(self._store.path(d).read_bytes() for d in digests))

    def publish_state(self, step: int, state: FlatState) -> None:
        self.publish(step, {t.name: (t.dtype, state.tensor(t.name).copy()) for t in LAYOUT.tensors})

    def ways(self) -> list[tuple[str, str, str]]:
        return [(m.kind, str(m.base or ""), str(m.version)) for m in self.made]


def state_of(step: int) -> FlatState:
    """A few more words of the first state changed with every step."""
    state, draw = FlatState.in_memory(LAYOUT), np.random.default_rng(1)
    for spec in LAYOUT.tensors:
        words = state.tensor(spec.name)
        words[...] = draw.integers(0, 2**16, words.shape)
        words.reshape(-1)[: 10 * step] += words.dtype.type(3)
    return state


def check(made: list[Made], states: dict[str, FlatState]) -> None:
    """Each of them, applied to what its base has, gives what its version has."""
    for m in made:
        out, base = FlatState.in_memory(LAYOUT), states[str(m.base)] if m.base else None
        assert m.base_digest == (base.digest() if base else b"")
        for segment, payload in zip(LAYOUT.segments(SEGMENT), m.segments, strict=True):
            decode_segment(payload, base.words(segment) if base else None, out.words(segment))
        assert out.digest() == m.digest == states[str(m.version)].digest()
        assert len({(o.version, o.kind, o.base) for o in made}) == len(made), "the head would equivocate"


@pytest.mark.parametrize(("anchor_every", "squash_every"), [(100, 0), (4, 0), (6, 3), (4, 4), (1, 2), (5, 1)])
def test_every_way_ends_at_the_same_bits(tmp_path: Path, anchor_every: int, squash_every: int) -> None:
    (tmp_path / "versions").mkdir()
    head = Head(tmp_path, anchor_every=anchor_every, squash_every=squash_every)
    states = {f"1.{step}": state_of(step) for step in range(14)}
    for step in range(14):
        head.publish_state(step, states[f"1.{step}"])
    check(head.made, states)
    assert [m for m in head.ways() if m[0] == "delta"] == [("delta", f"1.{s - 1}", f"1.{s}") for s in range(1, 14)]
    assert [m[2] for m in head.ways() if m[0] == "anchor"] == [f"1.{s}" for s in range(14) if s % anchor_every == 0]
    spans = {(base, version) for kind, base, version in head.ways() if kind == "cumulative"}
    wanted = {("1.0", f"1.{s}") for s in range(2, 14) if s % anchor_every == 0}
    if squash_every > 1:
        wanted |= {(f"1.{s - squash_every}", f"1.{s}") for s in range(squash_every, 14, squash_every)}
    assert spans == wanted
    assert len(head._free) <= 3, "states are used again"  # each is the size of a model
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
