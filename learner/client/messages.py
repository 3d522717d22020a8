"""Messages between the head and its trainer, over a Unix socket in the run directory. Must not know torch or trio.

Small messages only: micro-batches, tensor tables and chunks go through files. One request at a time; the head answers every
request but `SegmentDone`, and sends `Wait` every few seconds while an answer is not ready, so silence always means trouble.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from p2p.protocol.wire import message

SOCKET = "trainer.sock"
"""The socket's name in the run directory."""

HEARTBEAT_S = 2.0
"""How often the head says that it is still busy with an answer."""

SILENCE_S = 30.0
"""A head that has said nothing for so long counts as gone: it missed some fifteen heartbeats."""


@message("t.resume")
@dataclass(frozen=True, slots=True)
class Resume:
    pid: int


@message("t.start")
@dataclass(frozen=True, slots=True)
class Start:
    """`checkpoint` is a folder, "" for a fresh run. `anchor_every` and `squash_every` in publications."""

    epoch: int
    step: int
    checkpoint: str
    segment_bytes: int
    anchor_every: int
    squash_every: int


@message("t.due")
@dataclass(frozen=True, slots=True)
class Due:
    """Is a version to be published after `step` steps?"""

    step: int


@message("t.is_due")
@dataclass(frozen=True, slots=True)
class IsDue:
    due: bool


@message("t.begin")
@dataclass(frozen=True, slots=True)
class Begin:
    """A version is about to come. `base` is the step of a delta's base, in this epoch unless `base_epoch` says another;
    a cumulative delta's may have been published long ago, so that its digest is told. `layout_file` holds the tensor table."""

    step: int
    kind: str
    base: int | None
    layout_file: str
    base_epoch: int = 0
    base_digest: bytes = b""


@message("t.begun")
@dataclass(frozen=True, slots=True)
class Begun:
    """Its chunks are to have `chunk_bytes`."""

    mid: bytes
    chunk_bytes: int


@message("t.segment")
@dataclass(frozen=True, slots=True)
class SegmentDone:
    """Segment `index` is in the store: `size` bytes, in chunks whose BLAKE3 `digests` (32 bytes each) are joined. `changed` of
    its `words` differ from the base. Not answered, so that the trainer encodes on; a refusal answers what it asks next."""

    mid: bytes
    index: int
    size: int
    digests: bytes
    changed: int
    words: int


@message("t.seal")
@dataclass(frozen=True, slots=True)
class SealVersion:
    mid: bytes
    tensor_digests: bytes
    state_digest: bytes
    encode_s: float


@message("t.next")
@dataclass(frozen=True, slots=True)
class NextBatch:
    """`seen` groups of this step were handed over already."""

    step: int
    seen: int


@message("t.batch")
@dataclass(frozen=True, slots=True)
class Batch:
    file: str
    last: bool
    total: int


@message("t.commit")
@dataclass(frozen=True, slots=True)
class CommitStep:
    step: int
    checkpoint: str


@message("t.discard")
@dataclass(frozen=True, slots=True)
class Discard:
    """The trainer cannot train on these groups of its current step (`reason` says why) and is about to stop."""

    step: int
    group_ids: tuple[int, ...]
    reason: str


@message("t.log")
@dataclass(frozen=True, slots=True)
class Log:
    """`metrics` is a JSON object of numbers."""

    step: int
    metrics: str


@message("t.finish")
@dataclass(frozen=True, slots=True)
class Finish:
    step: int


@message("t.ok")
@dataclass(frozen=True, slots=True)
class Ok:
    pass


@message("t.wait")
@dataclass(frozen=True, slots=True)
class Wait:
    pass


@message("t.error")
@dataclass(frozen=True, slots=True)
class Error:
    reason: str


@contextmanager
def socket_path(run_dir: Path) -> Iterator[str]:
    """A short name for the run directory's socket: a Unix socket path holds at most 107 bytes, a run directory may not."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)
