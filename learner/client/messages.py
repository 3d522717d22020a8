"""Messages between the head and its trainer, over a Unix socket in the run directory. Must not know torch or trio.

Small messages only: micro-batches, tensor tables and chunks go through files. One request at a time on a connection; the head
answers every request but `SegmentDone`, and sends `Wait` every few seconds while an answer is not ready, so silence always means
trouble.

A trainer has two connections. While it waits for groups on the first, versions and commits (BESIDE) go over the second: groups
may come only once a version is out, so they must not wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2p.protocol.wire import Blob, Count, Decoder, Digest, Message, Real, Row, Text

SOCKET = "trainer.sock"
"""Name of the trainer's socket in the run directory."""

BESIDE_SOCKET = "trainer-beside.sock"
"""Name of the socket for its second connection."""

HEARTBEAT_S = 2.0
"""Seconds between two `Wait`s while an answer is not ready."""

SILENCE_S = 300.0
"""Seconds without an answer or a `Wait` after which the trainer takes the head for gone. A head that ended has closed the socket,
which is seen at once; a silent one is held up, mostly by its disk. At 30 s a run was ended while other programs wrote gigabytes
and all I/O of the machine stood still."""


class Resume(Message, frozen=True, tag="t.resume"):
    pid: Count


class Start(Message, frozen=True, tag="t.start"):
    """`checkpoint` is a folder, "" for a fresh run. `anchor_every` and `squash_every` in publications."""

    epoch: Count
    step: Count
    checkpoint: Text
    segment_bytes: Count
    anchor_every: Count
    squash_every: Count


class Due(Message, frozen=True, tag="t.due"):
    """Is a version to be published after `step` steps?"""

    step: Count


class IsDue(Message, frozen=True, tag="t.is_due"):
    due: bool


class Begin(Message, frozen=True, tag="t.begin"):
    """A version is about to come. `base` is the step of a delta's base, in this epoch unless `base_epoch` says another; a
    cumulative delta's may have been published long ago, or never (epoch 0: the base model), so that its digest is told.
    `layout_file` holds the tensor table."""

    step: Count
    kind: Text
    base: Count | None
    layout_file: Text
    base_epoch: Count = 0
    base_digest: Digest = b""


class Begun(Message, frozen=True, tag="t.begun"):
    """Its chunks are to have `chunk_bytes`."""

    mid: Digest
    chunk_bytes: Count


class SegmentDone(Message, frozen=True, tag="t.segment"):
    """Segment `index` is in the store: `size` bytes, in chunks whose BLAKE3 `digests` (32 bytes each) are joined. `changed` of
    its `words` differ from the base. Not answered, so that the trainer encodes on; a refusal answers what it asks next."""

    mid: Digest
    index: Count
    size: Count
    digests: Blob
    changed: Count
    words: Count


class SealVersion(Message, frozen=True, tag="t.seal"):
    mid: Digest
    tensor_digests: Blob
    state_digest: Digest
    encode_s: Real


class NextBatch(Message, frozen=True, tag="t.next"):
    """`seen` groups of this step were handed over already."""

    step: Count
    seen: Count


class Batch(Message, frozen=True, tag="t.batch"):
    file: Text
    last: bool
    total: Count


class CommitStep(Message, frozen=True, tag="t.commit"):
    step: Count
    checkpoint: Text


class Discard(Message, frozen=True, tag="t.discard"):
    """The trainer cannot train on these groups of its current step (`reason` says why) and is about to stop."""

    step: Count
    group_ids: Row[Count]
    reason: Text


class Log(Message, frozen=True, tag="t.log"):
    """`metrics` is a JSON object of numbers."""

    step: Count
    metrics: Text


class Finish(Message, frozen=True, tag="t.finish"):
    step: Count


class Ok(Message, frozen=True, tag="t.ok"):
    """`keep_whole`, of a version that was sealed: its state is to lie whole in the run's directory
    (`learner.client.whole_states`)."""

    keep_whole: bool = False


class Wait(Message, frozen=True, tag="t.wait"):
    pass


class Error(Message, frozen=True, tag="t.error"):
    reason: Text


BESIDE: tuple[type[Message], ...] = (Begin, SegmentDone, SealVersion, CommitStep)
"""What may go over the second connection, and goes there in `learner.client.client`."""


decode = Decoder(globals())


@contextmanager
def socket_path(run_dir: Path, socket: str = SOCKET) -> Iterator[str]:
    """A short name for a socket of the run directory: a Unix socket path holds at most 107 bytes, a run directory may not."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{socket}"
    finally:
        os.close(fd)
