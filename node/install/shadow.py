"""The node's own durable copy of the served state: two flat files in turn, and a record of which is whole.

The next version is decoded from the held file into a new one while it arrives; only a state whose digests match its
seal can be committed, and a crash at any moment leaves the old version or the new one whole. Blocking file work: call
it from a worker thread. Must not know peers, manifests, engines' workings or trio.

A file is written again only once the version after it was committed, to the engine as well: nobody reads it any more then. It
is brought from that older version to the next one, so what did not change is not written. In every other case (a staging that was
dropped, another tensor table, a shadow that an engine overtook) a staging makes its file anew (same name, new inode), and an
engine that still maps the old one, or a decoder thread of the dropped staging, is not disturbed.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from node.engine.port import StateFile
from node.install.staging import HeldState, Staging
from p2p.errors import Refusal, UsageError
from p2p.files import sync, write_whole
from p2p.layout import Layout
from p2p.limits import DEFAULT_SEGMENT, MIB
from p2p.version import Version
from p2p.weights.manifest import DELTAS
from p2p.weights.state import FlatState, state_digest

log = logging.getLogger(__name__)

FORMAT = 1
"""The form of state.json and of the files that it names. A shadow of another form is thrown away."""

SLOTS = ("a", "b")
"""Names of the two files that take turns: one is held, the other is being written."""

DISK_MARGIN = 64 * MIB
"""Disk left free beside a staged state, for journals and logs."""


@dataclass(frozen=True, slots=True)
class _Spare:
    """The file of the version before the held one."""

    slot: str
    layout: Layout
    segment_bytes: int
    behind: frozenset[int]
    """the segments, of such a cut, in which it may differ from the held state"""


class Shadow:
    """At most one held state and one staging.

    Methods are called from one thread at a time; `Staging.write` may run in several threads beside each other.
    """

    def __init__(self, directory: Path, run: str) -> None:
        """Use `Shadow.open`."""
        self.directory, self.run = directory, run
        self._held: HeldState | None = None
        self._staging: Staging | None = None
        self._spare: _Spare | None = None

    @classmethod
    def open(cls, directory: Path, run: str) -> Shadow:
        """Load what `directory` (made when missing) holds, verifying the whole state against its digest.

        A torn or corrupt shadow is thrown away with a logged reason and `version` is None. UsageError when it belongs
        to another run: nothing is touched then. OSError when the directory cannot be read or written.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        shadow = cls(directory, run)
        if (directory / "state.json").exists():
            try:
                shadow._held = shadow._load()
            except (ValueError, KeyError, TypeError, FileNotFoundError, Refusal) as error:
                log.warning("shadow in %s thrown away: %s", directory, error)
                (directory / "state.json").unlink()
        (directory / "state.json.tmp").unlink(missing_ok=True)
        for slot in SLOTS:
            if shadow._held is None or slot != shadow._held.slot:
                shadow._remove(slot)
        return shadow

    @property
    def version(self) -> Version | None:
        return self._held.version if self._held else None

    @property
    def digest(self) -> bytes | None:
        """The held state's digest (32 bytes)."""
        return self._held.digest if self._held else None

    def state_file(self) -> StateFile:
        """The held state, all of it changed as far as anyone knows. RuntimeError when none is held."""
        if self._held is None:
            raise RuntimeError(f"shadow in {self.directory} holds no version")
        return StateFile(self._state_path(self._held.slot), self._held.state.layout, self._held.version)

    def begin(
        self,
        version: Version,
        kind: str,
        layout: Layout,
        base: Version | None = None,
        base_digest: bytes | None = None,
        *,
        segment_bytes: int = DEFAULT_SEGMENT,
        over: bool = False,
    ) -> Staging:
        """Make room for `version`, cut into `layout.segments(segment_bytes)`; drops an earlier staging.

        kind is "anchor" (no base) or one of DELTAS (its base's digest must be the one held). Refusal, before anything is
        dropped, on another base, another tensor table, a version not past the held one, or too little disk. `over`: an anchor
        may be older than what is held, which is given up for it.
        """
        if kind not in ("anchor", *DELTAS):
            raise ValueError(f"kind is {kind!r}, want anchor, {' or '.join(DELTAS)}")
        if self._held and version <= self._held.version and not (over and kind == "anchor"):
            raise Refusal(f"not newer than version {self._held.version}, which is held", version=version)
        if kind in DELTAS:
            if self._held is None or base_digest is None or base_digest != self._held.digest:
                holds = f"version {self._held.version} ({self._held.digest.hex()[:16]})" if self._held else "nothing"
                wants = f"version {base} ({base_digest.hex()[:16] if base_digest else 'no digest'})"
                raise Refusal(f"unknown base: delta is against {wants}, the shadow holds {holds}", version=version)
            if layout.digest != self._held.state.layout.digest:
                raise Refusal("delta's tensor table is not its base's", version=version)
        slot = next(s for s in SLOTS if self._held is None or s != self._held.slot)
        self._check_disk(slot, layout, version)
        if self._staging:
            self._staging.discard()
        spare, self._spare = self._spare, None
        if spare is not None and (spare.slot, spare.layout.digest, spare.segment_bytes) != (slot, layout.digest, segment_bytes):
            spare = None
        try:
            state = self._open_spare(spare)
            if state is None:
                spare = None
                self._remove(slot)
                state = FlatState.create(self._state_path(slot), layout, reserve=True)
        except OSError as error:
            raise Refusal(f"no room for a state of {layout.nbytes} bytes: {error}", version=version) from error
        self._staging = Staging(
            slot, version, state, kind=kind, held=self._held, segment_bytes=segment_bytes,
            behind=spare.behind if spare is not None else None,
        )  # fmt: skip
        return self._staging

    def _open_spare(self, spare: _Spare | None) -> FlatState | None:
        """The spare's file, to be written to; None when there is none."""
        if spare is None:
            return None
        try:
            return FlatState.open(self._state_path(spare.slot), spare.layout, writable=True)
        except (FileNotFoundError, ValueError):
            return None

    def commit(self, staging: Staging) -> None:
        """Make a finished staging the held state, durably. RuntimeError when it is not finished or not the current one.

        On OSError `version` is what the disk now says is held: the old one, or (only the directory's sync failed) the
        new one. The staging that was not committed stays and may be committed again.
        """
        if staging is not self._staging or staging.over or staging.held is None:
            raise RuntimeError(f"version {staging.version} is not finished, or was dropped")
        staging.state.flush()
        write_whole(self._layout_path(staging.slot), msgpack.packb(staging.state.layout.to_wire()), durable=True)
        sync(self.directory)
        # A read-only mapping from here on: nothing can write to the state that is served.
        held = replace(staging.held, state=FlatState.open(self._state_path(staging.slot), staging.state.layout))
        before = self._held
        try:
            self._save(held)
        finally:
            if self._held is held:
                staging.close()
                self._staging = None
                if before is not None and staging.is_delta:
                    self._spare = _Spare(before.slot, before.state.layout, staging.segment_bytes, frozenset(staging.changed))

    def fill(self, version: Version, layout: Layout, write: Callable[[FlatState], None]) -> None:
        """Hold, durably, a state that did not come from the swarm: `write` is handed it, all zero. Refusal as `begin`; whatever
        `write` raises leaves nothing behind."""
        staging = self.begin(version, "anchor", layout)
        try:
            for segment in staging.segments:
                staging.state.populate(segment)
            write(staging.state)
            digests = tuple(staging.state.tensor_digests())
        except BaseException:
            staging.discard()
            raise
        staging.held = HeldState(staging.slot, version, state_digest(layout, digests), digests, staging.state)
        self.commit(staging)

    def adopt(self, version: Version, digest: bytes) -> None:
        """Call the held state `version`, durably: a resumed learner announces the same bits under its new epoch.
        Refusal when the digest is not the held one's, or the version is older than the held one. A staging that is not
        past `version` is dropped: the epoch that made it is over."""
        if self._held is None or digest != self._held.digest:
            raise Refusal(f"cannot adopt: not the digest of version {self.version}, which is held", version=version)
        if version < self._held.version:
            raise Refusal(f"cannot adopt: older than version {self._held.version}, which is held", version=version)
        if self._staging and self._staging.version <= version:
            self._staging.discard()
            self._staging = None
        self._save(replace(self._held, version=version))

    def _save(self, held: HeldState) -> None:
        """Point state.json at `held`: the instant of a commit is the rename."""
        record = {
            "format": FORMAT,
            "run": self.run,
            "version": str(held.version),
            "slot": held.slot,
            "layout": held.state.layout.digest.hex(),
            "digest": held.digest.hex(),
        }
        write_whole(self.directory / "state.json", json.dumps(record, indent=1), durable=True)
        self._held = held
        sync(self.directory)

    def _load(self) -> HeldState:
        record: Any = json.loads((self.directory / "state.json").read_text(encoding="utf-8"))
        if not isinstance(record, dict) or not isinstance(record.get("run"), str):
            raise ValueError("state.json is not a shadow's")
        if record["run"] != self.run:
            raise UsageError(f"{self.directory} is of run {record['run']!r}, this node joined run {self.run!r}")
        if record["format"] != FORMAT or record["slot"] not in SLOTS:
            raise ValueError(f"state.json has format {record['format']!r} and slot {record['slot']!r}")
        slot, version, digest = record["slot"], Version.parse(str(record["version"])), bytes.fromhex(record["digest"])
        try:
            wire = msgpack.unpackb(self._layout_path(slot).read_bytes())
        except msgpack.UnpackException as error:
            raise ValueError(f"tensor table: {error}") from error
        layout = Layout.from_wire(wire)
        if layout.digest.hex() != record["layout"]:
            raise ValueError(f"version {version}: the tensor table is not the one its record names")
        state = FlatState.open(self._state_path(slot), layout)
        tensor_digests = state.tensor_digests()
        if state_digest(layout, tensor_digests) != digest or not state.padding_is_zero():
            raise ValueError(f"version {version}: the state's bytes do not match its digest")
        return HeldState(slot, version, digest, tuple(tensor_digests), state)

    def _check_disk(self, slot: str, layout: Layout, version: Version) -> None:
        path = self._state_path(slot)
        freed = path.stat().st_blocks * 512 if path.exists() else 0
        free = shutil.disk_usage(self.directory).free + freed
        if free < layout.nbytes + DISK_MARGIN:
            raise Refusal(
                f"disk of {self.directory} has {free} bytes free, a state of {layout.nbytes} and a margin of "
                f"{DISK_MARGIN} do not fit",
                version=version,
            )

    def _remove(self, slot: str) -> None:
        self._state_path(slot).unlink(missing_ok=True)
        self._layout_path(slot).unlink(missing_ok=True)

    def _state_path(self, slot: str) -> Path:
        return self.directory / f"{slot}.state"

    def _layout_path(self, slot: str) -> Path:
        return self.directory / f"{slot}.layout.msgpack"
