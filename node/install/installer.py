"""Brings this node to the current version and keeps it there: plan, receive, decode, check, commit, step by step.

Must not know requests, tokens or why versions are made. One version is installed at a time; later ones gather their chunks
meanwhile. Anything wrong with one (a refusal, no progress, an engine that cannot take it) leaves the version before in
place, and the installer plans again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import trio

from node.engine.port import CommitResult, EngineDied
from node.install.base_model import BaseModel
from node.install.decoding import decode_as_they_come
from node.install.engine_slot import EngineSlot
from node.install.plan import InstallPlan
from node.install.progress import DownloadProgress, spell_out_bytes
from node.install.room import InstallRoom, NoRoom
from p2p.broadcast.exchange import Exchange
from p2p.codec import decode_segment
from p2p.errors import Refusal, ShoalError
from p2p.protocol.descriptor import TENSOR, unpack_descriptor
from p2p.protocol.versions import Catalog, CatalogEntry, GetCatalog, Installed
from p2p.stages import reached
from p2p.version import Version
from p2p.weights.manifest import Manifest
from p2p.weights.state import FlatState, state_digest

log = logging.getLogger("shoal.install")

PROGRESS_S = 30.0
"""A manifest that gained no record and no chunk for so long is given up and planned again."""

HEADER_S = 5.0
"""A manifest whose header the head does not send within so long is not there any more."""

KEEP = 16
"""Manifests kept after they were installed, for neighbours that join or are a few versions behind. A full store lets
go of them earlier; the descriptor is small, every joiner needs it, and it stays."""

REPLAN_S = 1.0
"""After a failed install: wait for the neighbours or the catalog to change."""

BEFORE_ALL = Version(0, 0)
"""What a base model counts as: epochs begin with 1."""

CATALOG_ASK_S = 5.0
"""How often a node that finds no path asks the head for its catalog again."""


class Installer:
    """One node's way from version to version.

    `in_thread(fn, *args)` runs blocking work (decode, digests, disk) off the event loop. `on_installed` hears every version that
    serves. `room`: what the owner lets it hold. `slot` takes each version that is whole into the engine, if there is one, and
    into the shadow.
    """

    def __init__(
        self,
        exchange: Exchange,
        slot: EngineSlot,
        in_thread: Callable[..., Awaitable[Any]],
        on_installed: Callable[[Installed], Awaitable[None]],
        base_model: BaseModel | None = None,
        room: InstallRoom | None = None,
    ) -> None:
        self._room, self._no_room = room, ""
        self._exchange, self.shadow, self._slot = exchange, slot.shadow, slot
        self._in_thread, self._on_installed, self._base_model = in_thread, on_installed, base_model
        self._plan = InstallPlan()
        self._kept: list[bytes] = []
        self._descriptor_done = False
        self._wake = trio.Event()
        self._asleep = False
        self._asked = False
        """for the catalog, since nothing led on"""
        self._answered_at: Version | None = None
        """the held version from which nothing led on, when the catalog came that was asked for"""
        exchange.on_header, exchange.on_full = self._consider, self._free
        exchange.floor = self.shadow.version

    # --- what there is to install ------------------------------------------------------------------------------------

    def new_epoch(self, epoch: int) -> None:
        """The head answered under this epoch: what earlier epochs announced is over."""
        if epoch != self._exchange.min_epoch:
            self._exchange.min_epoch = epoch
            for mid, transfer in list(self._exchange.transfers.items()):
                if transfer.manifest.version.epoch < epoch:
                    self._forget(mid)
            self._plan.new_epoch(epoch)

    def set_catalog(self, catalog: Catalog) -> None:
        """What the head retains, and which version is current. From here on new deltas are followed."""
        self._plan.set_catalog(catalog, self._exchange.min_epoch, self._exchange.transfers.keys())
        if self._asked:
            self._asked, self._answered_at = False, self.shadow.version
            self._plan.bad.clear()
        self._exchange.follow(not self._asleep)
        self._wake.set()

    def sleep(self) -> None:
        """Take no version after the one under way, until `wake`."""
        self._asleep = True
        self._exchange.follow(False)

    def wake(self) -> None:
        """Catch up, and follow again."""
        if self._asleep:
            self._asleep = False
            self._ask_catalog()
            self._wake.set()

    def _consider(self, manifest: Manifest) -> bool:
        """A header arrived: remember it; take part at once in deltas, which this node follows."""
        if self._asleep:
            return False  # the head says all of it again when this node wakes
        fresh = self._plan.consider(manifest.mid, manifest.header)
        if fresh:
            self._wake.set()
        return fresh

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Install what the catalog leads to, one version after the other, until cancelled."""
        last_ask = -math.inf
        while True:
            self._wake = trio.Event()
            await self._begin_with_base_model()
            entry = self._next()
            if entry is None:
                await self._refuse_stranded()
                behind = not self._asleep and self._plan.behind(self.shadow.version)
                if behind and trio.current_time() - last_ask > CATALOG_ASK_S:
                    last_ask = trio.current_time()
                    held, wanted = self.shadow.version, self._plan.current
                    log.info("no known chain leads from %s to %s; asking for the catalog", held, wanted)
                    self._asked = self._ask_catalog()
                    if not self._asked:
                        self._plan.bad.clear()  # the neighbours alone, then
                with trio.move_on_after(REPLAN_S):
                    await self._wake.wait()
                continue
            try:
                if entry.kind == "descriptor":
                    await self._fetch_descriptor(entry)
                else:
                    await self._install(entry)
            except NoRoom as refused:
                await self._leave_out(entry, refused)
            except Refusal as refusal:
                log.error("%s (keeping version %s)", refusal.at(version=entry.version), self.shadow.version)
                await self._give_up(entry, refusal)
            except (ShoalError, EngineDied, OSError, RuntimeError) as error:
                log.error("version %s not installed: %s (keeping %s)", entry.version, error, self.shadow.version)
                # What came of it stays; another way is tried first.
                self._plan.bad.add(entry.mid)
                await trio.sleep(REPLAN_S)

    async def _begin_with_base_model(self) -> None:
        """Hold the base model that this node was given, as a version before all others: the catalog may have a way from there."""
        base, anchors = self._base_model, self._plan.anchors()
        if base is None or not self._descriptor_done or not anchors:
            return
        self._base_model = None  # one try: whatever goes wrong, there is the anchor
        if self.shadow.version is not None:
            return
        mid = anchors[-1].mid
        self._exchange.ask_manifest(mid, self._exchange.head)
        try:
            with trio.fail_after(HEADER_S):
                layout = (await self._exchange.manifest(mid)).header.layout
            await self._in_thread(self.shadow.fill, BEFORE_ALL, layout, base.write)
        except (trio.TooSlowError, ShoalError, OSError) as error:
            log.error("cannot begin with the base model: %s", error or f"no manifest came within {HEADER_S:.0f} s")
            return
        leads = self._plan.leads_on_from(self.shadow.digest)
        log.log(
            logging.INFO if leads else logging.WARNING, "base model in %s is %s", base.folder,
            "what this run began with: only the difference is downloaded" if leads else "not what this run began with",
        )  # fmt: skip

    def _ask_catalog(self) -> bool:
        """False without a link to the head."""
        head = self._exchange.peers.get(self._exchange.head)
        if head is not None:
            head.post(GetCatalog())
        return head is not None

    def _next(self) -> CatalogEntry | None:
        """What to install next, if anything."""
        if not self._descriptor_done:
            return self._plan.descriptor()
        if self._asleep:
            return None
        held = self.shadow.version
        entry = self._plan.next(held, self.shadow.digest)
        if entry is None and held is not None and held == self._answered_at:
            entry = self._plan.start_over(held, self.shadow.digest)
            if entry is not None:
                log.warning("the head keeps nothing that leads on from version %s: from version %s again", held, entry.version)
        return entry

    async def _refuse_stranded(self) -> None:
        """Say of every delta that cannot be installed here, since its base is unknown, that it is refused."""
        held = self.shadow.version
        if held is None or self._asleep:
            return
        for e in self._plan.stranded(held):
            base, digest = f"version {e.base} ({e.base_digest.hex()[:16]})", (self.shadow.digest or b"").hex()[:16]
            reason = f"unknown base: delta is against {base}, held is version {held} ({digest})"
            refusal = Refusal(reason, peer=self._exchange.head, version=e.version)
            log.error("%s (keeping version %s)", refusal, held)
            await self._exchange.report(self._exchange.head, refusal)

    async def _give_up(self, entry: CatalogEntry, refusal: Refusal) -> None:
        self._plan.bad.add(entry.mid)
        self._forget(entry.mid)
        await self._exchange.report(self._exchange.head, refusal.at(version=entry.version))

    async def _leave_out(self, entry: CatalogEntry, refused: NoRoom) -> None:
        """The owner's limits have no room for it. Said once; looked at again with the next catalog, for limits change."""
        said = f"version {entry.version} is not taken: {refused.reason} (keeping {self.shadow.version})"
        if said != self._no_room:
            self._no_room = said
            log.error("%s", said)
        self._plan.bad.add(entry.mid)
        self._forget(entry.mid)
        await trio.sleep(REPLAN_S)

    def _free(self) -> bool:
        """The store is full: let go of the oldest manifest that is kept only for neighbours."""
        if not self._kept:
            return False
        self._forget(self._kept[0])
        return True

    def _forget(self, mid: bytes) -> None:
        self._exchange.store.drop(self._exchange.forget(mid))
        self._kept = [m for m in self._kept if m != mid]

    async def _receive(self, entry: CatalogEntry) -> Manifest:
        """Take part in a manifest; returns once its header is here."""
        mid = entry.mid
        if entry.kind in ("anchor", "cumulative"):
            self._forget_superseded(entry.version, but=mid)
        if mid not in self._exchange.transfers:
            self._exchange.ask_manifest(mid, self._exchange.head)
        with trio.move_on_after(HEADER_S):
            await self._exchange.manifest(mid)
        if mid not in self._exchange.transfers:
            # The head has pruned it, or is away: drop the stale entry and look at a fresh catalog.
            self._plan.drop(mid)
            self._ask_catalog()
            raise ShoalError(f"manifest {mid.hex()[:12]} is not to be had any more")
        manifest = self._exchange.transfers[mid].manifest
        if self._room is not None and entry.kind != "descriptor":
            self._room.check(entry.version, manifest.header.layout.nbytes, entry.size)
        self._exchange.take(mid, catching=entry.size > 0)
        return manifest

    async def _watched(self, mid: bytes, wait: Callable[[], Awaitable[Any]]) -> Any:
        """`await wait()`, given up when the manifest makes no progress for PROGRESS_S. What is cancelled is a wait on
        events in memory, never a transfer."""
        before = self._exchange.progress(mid)
        while True:
            with trio.move_on_after(PROGRESS_S):
                return await wait()
            after = self._exchange.progress(mid)
            if after == before:
                raise ShoalError(f"manifest {mid.hex()[:12]}: no chunk from any peer for {PROGRESS_S:.0f} s")
            before = after

    # --- one manifest ------------------------------------------------------------------------------------------------

    async def _fetch_descriptor(self, entry: CatalogEntry) -> None:
        manifest = await self._receive(entry)
        state = FlatState.in_memory(manifest.header.layout)
        for segment in manifest.segments:
            payload = await self._watched(manifest.mid, lambda i=segment.index: self._exchange.segment(manifest.mid, i))  # type: ignore[misc]
            decode_segment(payload, None, state.words(segment))
        sealed = await self._watched(manifest.mid, lambda: self._exchange.sealed(manifest.mid))
        if state_digest(state.layout, state.tensor_digests()) != sealed.seal.state_digest:
            raise Refusal("the model descriptor does not hash to its seal", version=manifest.version)
        if TENSOR not in state.layout.by_name:
            raise Refusal("the model descriptor holds no descriptor", version=manifest.version)
        unpack_descriptor(np.asarray(state.tensor(TENSOR)).tobytes(), self._slot.model_dir)
        self._descriptor_done = True
        self._plan.drop(manifest.mid)
        log.info("the model's config and tokenizer are here")
        if self.shadow.version is not None and self.shadow.version > BEFORE_ALL:
            self._slot.servable.set()

    async def _install(self, entry: CatalogEntry) -> None:
        started = trio.current_time()
        if entry.kind == "same":  # a learner that resumed: nothing to download
            relabelled = await self._slot.relabel(entry.version, entry.state_digest)
            log.info("held state is version %s already", entry.version)
            await self._announce(relabelled, entry.state_digest)
            return
        manifest = await self._receive(entry)
        traffic = self._exchange.transfers[manifest.mid].traffic
        h = manifest.header
        reached(h.version, "header here")
        held = self.shadow.version
        staging = self.shadow.begin(
            h.version, h.kind, h.layout, h.base, h.base_digest, segment_bytes=h.segment_bytes,
            over=held is not None and entry.version <= held,
        )  # fmt: skip
        long = self.shadow.version is None or h.kind in ("anchor", "cumulative")  # deltas come one after the other, and are short
        progress = DownloadProgress(f"version {h.version}", len(manifest.segments), started)
        if long:
            log.info("downloading version %s: a model of %s", h.version, spell_out_bytes(h.layout.nbytes))

        async def segment(index: int) -> Any:
            payload = await self._watched(manifest.mid, lambda: self._exchange.segment(manifest.mid, index))
            if index == len(manifest.segments) - 1:  # they are awaited in order
                reached(h.version, "chunks here")
            line = progress.part(trio.current_time(), traffic.from_head + traffic.from_peers)
            if line and long:
                log.info("%s", line)
            return payload

        try:
            await decode_as_they_come(
                manifest.segments, segment, lambda segment, payload: self._in_thread(staging.write, segment, payload)
            )
            reached(h.version, "decoded")
            sealed = await self._watched(manifest.mid, lambda: self._exchange.sealed(manifest.mid))
            reached(h.version, "seal here")
            state = await self._in_thread(staging.finish, sealed.seal.tensor_digests, sealed.seal.state_digest)
            reached(h.version, "checked")
            transfer_s = trio.current_time() - started
            if long:
                log.info("%s", progress.done(trio.current_time(), traffic.from_head + traffic.from_peers))
            result = await self._slot.commit(staging, state)
        except BaseException:
            staging.discard()
            raise
        self._keep(manifest.mid)
        await self._announce(
            result, sealed.seal.state_digest, transfer_s=transfer_s, from_head=traffic.from_head, from_peers=traffic.from_peers
        )

    async def _announce(
        self, result: CommitResult, digest: bytes, *, transfer_s: float = 0.0, from_head: int = 0, from_peers: int = 0
    ) -> None:
        self._exchange.floor = self.shadow.version
        self._slot.servable.set()
        await self._on_installed(
            Installed(
                result.version, digest, pause_s=result.pause_s, apply_s=result.apply_s, transfer_s=transfer_s,
                bytes_from_head=from_head, bytes_from_peers=from_peers,
            )
        )  # fmt: skip

    def _keep(self, mid: bytes) -> None:
        """An installed manifest goes on being relayed for a while, then makes room."""
        self._plan.drop(mid)
        if mid in self._exchange.transfers:  # a new epoch may have swept it away meanwhile
            self._kept.append(mid)
        if self.shadow.version is not None:
            self._forget_superseded(self.shadow.version, but=mid)
        while len(self._kept) > KEEP:
            self._forget(self._kept[0])

    def _forget_superseded(self, version: Version, *, but: bytes) -> None:
        """Drop manifests that an anchor overtook: nobody here will install them, and their number is limited."""
        for mid, transfer in list(self._exchange.transfers.items()):
            m = transfer.manifest
            if m.header.kind != "descriptor" and m.version <= version and mid != but and mid not in self._kept:
                self._forget(mid)
                self._plan.drop(mid)
        self._plan.forget_dropped()
