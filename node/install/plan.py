"""Which version to install next: what the head offers, what was tried, and the cheapest way on from what is held. Pure.

Must not know how chunks come, engines or the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from p2p.protocol.versions import Catalog, CatalogEntry
from p2p.version import Version
from p2p.weights.catalog import plan_catch_up
from p2p.weights.manifest import Header


@dataclass
class InstallPlan:
    """What one node knows of versions that it may install, by the id of their manifest."""

    entries: dict[bytes, CatalogEntry] = field(default_factory=dict, init=False)
    current: Version | None = field(default=None, init=False)
    """the newest that was heard of"""
    bad: set[bytes] = field(default_factory=set, init=False)
    """given up for now: tried again when nothing else leads on"""
    _stranded: set[bytes] = field(default_factory=set, init=False)
    """deltas whose base is not ours and not to be had, said once each"""

    def new_epoch(self, epoch: int) -> None:
        """What earlier epochs announced is over."""
        self.entries = {mid: e for mid, e in self.entries.items() if e.version.epoch >= epoch}
        self.current = None

    def set_catalog(self, catalog: Catalog, epoch: int, live: Set[bytes]) -> None:
        """What the head retains; of the rest stays what is `live`, that is, still relayed here, unless it was tried in
        vain. Earlier epochs do not count."""
        known = {e.mid: e for e in catalog.entries if e.version.epoch >= epoch}
        self.entries = {mid: e for mid, e in self.entries.items() if mid in live - self.bad and mid not in known} | known
        self._advance(catalog.current)

    def consider(self, mid: bytes, header: Header) -> bool:
        """A header arrived: whether it is a delta that was not known."""
        if mid in self.entries or header.kind != "delta":
            return False
        h = header
        self.entries[mid] = CatalogEntry(
            mid, h.kind, h.version, base=h.base, base_digest=h.base_digest, state_digest=b"", size=0
        )
        self._advance(h.version)
        return True

    def drop(self, mid: bytes) -> None:
        """It is installed, or not to be had any more."""
        self.entries.pop(mid, None)

    def forget_dropped(self) -> None:
        """Nothing is kept of what was dropped."""
        self._stranded &= self.entries.keys()
        self.bad &= self.entries.keys()

    def _advance(self, version: Version) -> None:
        if self.current is None or version > self.current:
            self.current = version

    def descriptor(self) -> CatalogEntry | None:
        """The model descriptor, unless it was given up."""
        return next((e for e in self._usable() if e.kind == "descriptor"), None)

    def anchors(self) -> list[CatalogEntry]:
        return [e for e in self.entries.values() if e.kind == "anchor"]

    def leads_on_from(self, digest: bytes | None) -> bool:
        """Whether some version begins with the state that has this digest, or is it."""
        return any(digest in (e.base_digest, e.state_digest) for e in self.entries.values())

    def behind(self, held: Version | None) -> bool:
        """Whether there is a newer version than the one held."""
        return self.current is not None and (held is None or held < self.current)

    def next(self, held: Version | None, digest: bytes | None) -> CatalogEntry | None:
        """The next manifest on the cheapest path from the held state, which has `digest`; of kind "same" where the target has the
        same bits, so that only its name is new."""
        return self._next_of(self._usable(), held, digest)

    def start_over(self, held: Version, digest: bytes | None) -> CatalogEntry | None:
        """The anchor to begin again with, which is no newer than the held version: the head let go of what leads on from
        it, and what is newer begins with the anchor. None while something else can be tried, be it a second time."""
        if self._next_of(self.entries.values(), held, digest) is not None:
            return None
        usable = self._usable()
        targets = sorted({e.version for e in usable if e.version > held}, reverse=True)
        paths = (plan_catch_up(usable, target, None, None) for target in targets)
        return next((path[0] for path in paths if path), None)

    def _next_of(self, entries: Iterable[CatalogEntry], held: Version | None, digest: bytes | None) -> CatalogEntry | None:
        if self.current is None:
            return None
        # What is not past the held version cannot be begun, so no path leads over it.
        usable = [e for e in entries if e.kind != "descriptor" and (held is None or e.version > held)]
        # The newest that can be reached: a broken link in a chain must not hold back the versions before it.
        for target in sorted({e.version for e in usable}, reverse=True):
            path = plan_catch_up(usable, target, held, digest)
            if path:
                return path[0]
            same = next((e for e in usable if e.version == target and e.state_digest and e.state_digest == digest), None)
            if path == [] and same is not None:
                return CatalogEntry(
                    same.mid, "same", target, base=None, base_digest=b"", state_digest=same.state_digest, size=0
                )
        return None

    def stranded(self, held: Version) -> list[CatalogEntry]:
        """Deltas that cannot be installed here, since their base is unknown; each is told once."""
        newer = [e for e in self.entries.values() if e.version > held]
        known = {e.version for e in newer}
        found = [e for e in newer if e.kind == "delta" and e.base not in known and e.mid not in self._stranded | self.bad]
        self._stranded.update(e.mid for e in found)
        return found

    def _usable(self) -> list[CatalogEntry]:
        return [e for mid, e in self.entries.items() if mid not in self.bad]
