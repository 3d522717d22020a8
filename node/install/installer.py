"""Brings this node to the current version and keeps it there: plan, receive, decode, check, commit, step by step.

Must not know requests, tokens or why versions are made. One version is installed at a time; later ones gather their chunks
meanwhile. Anything wrong with one (a refusal, no progress, an engine that cannot take it) leaves the version before in
place, and the installer plans again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import trio

from node.engine.port import CommitResult, Engine, EngineDied, StateFile
from node.install.base_model import BaseModel
from node.install.decoding import decode_as_they_come
from node.install.shadow import Shadow, Staging
from p2p.broadcast.exchange import Exchange
from p2p.codec import decode_segment
from p2p.errors import Refusal, ShoalError
from p2p.protocol.descriptor import TENSOR, unpack_descriptor
from p2p.protocol.versions import Catalog, CatalogEntry, GetCatalog, Installed
from p2p.version import Version
from p2p.weights.catalog import plan_catch_up
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

    `in_thread(fn, *args)` runs blocking work (decode, digests, disk) off the event loop. `on_installed` hears every
    version that serves. `before_commit(version)` is entered when everything is ready for the engine to take a version, which
    it does inside.
    """

    def __init__(
        self,
        exchange: Exchange,
        shadow: Shadow,
        model_dir: Path,
        in_thread: Callable[..., Awaitable[Any]],
        on_installed: Callable[[Installed], Awaitable[None]],
        base_model: BaseModel | None = None,
        before_commit: Callable[[Version], AbstractAsyncContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        self._exchange, self.shadow, self.model_dir = exchange, shadow, model_dir
        self._in_thread, self._on_installed, self._base_model = in_thread, on_installed, base_model
        self._before_commit = before_commit
        self.serving: Version | None = None
        """the version the engine runs; None while there is no engine"""
        self._entries: dict[bytes, CatalogEntry] = {}
        self._current: Version | None = None
        self._bad: set[bytes] = set()
        """given up for now: tried again when nothing else leads on"""
        self._stranded: set[bytes] = set()
        """deltas whose base is not ours and not to be had, said once each"""
        self._kept: list[bytes] = []
        self._descriptor_done = False
        self._engine: Engine | None = None
        self._engine_holds: bytes | None = None
        """state digest of the engine's own weights; None: not known, so it must copy all of the next state"""
        self._engine_lock = trio.Lock()
        self._wake = trio.Event()
        self._servable = trio.Event()
        self._asleep = False
        exchange.on_header, exchange.on_full = self._consider, self._free
        exchange.floor = shadow.version

    # --- what there is to install ------------------------------------------------------------------------------------

    def new_epoch(self, epoch: int) -> None:
        """The head answered under this epoch: what earlier epochs announced is over."""
        if epoch != self._exchange.min_epoch:
            self._exchange.min_epoch = epoch
            for mid, spread in list(self._exchange.spreads.items()):
                if spread.manifest.version.epoch < epoch:
                    self._forget(mid)
            self._entries = {m: e for m, e in self._entries.items() if e.version.epoch >= epoch}
            self._current = None

    def set_catalog(self, catalog: Catalog) -> None:
        """What the head retains, and which version is current. From here on new deltas are followed."""
        known = {e.mid: e for e in catalog.entries if e.version.epoch >= self._exchange.min_epoch}
        live = {m: e for m, e in self._entries.items() if m in self._exchange.spreads and m not in known}
        self._entries = {**live, **known}
        self._advance(catalog.current)
        self._exchange.follow(not self._asleep)
        self._poke()

    def sleep(self) -> None:
        """Take no version after the one under way, until `wake`."""
        self._asleep = True
        self._exchange.follow(False)

    def wake(self) -> None:
        """Catch up, and follow again."""
        if self._asleep:
            self._asleep = False
            self._ask_catalog()
            self._poke()

    def _consider(self, manifest: Manifest) -> bool:
        """A header arrived: remember it; take part at once in deltas, which this node follows."""
        if self._asleep:
            return False  # the head says all of it again when this node wakes
        h = manifest.header
        known = self._entries.get(manifest.mid)
        if known is None and h.kind == "delta":
            self._entries[manifest.mid] = CatalogEntry(manifest.mid, h.kind, h.version, h.base, h.base_digest, b"", 0)
            self._advance(h.version)
            self._poke()
            return True
        return False

    def _advance(self, version: Version) -> None:
        if self._current is None or version > self._current:
            self._current = version

    def _poke(self) -> None:
        self._wake.set()

    # --- the engine --------------------------------------------------------------------------------------------------

    async def wait_servable(self) -> None:
        """Until the descriptor and a first version are here, so that an engine can start."""
        await self._servable.wait()

    async def attach(self, engine: Engine) -> None:
        """Load `engine` with the held version; from here on it is updated in place."""
        async with self._engine_lock:
            await engine.load(self.model_dir, self.shadow.state_file())
            self._engine, self._engine_holds, self.serving = engine, self.shadow.digest, self.shadow.version
        log.info("engine serves version %s", self.serving)

    def detach(self) -> None:
        """The engine is gone; versions go on being installed into the shadow."""
        self._engine, self._engine_holds, self.serving = None, None, None

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        last_ask = -math.inf
        while True:
            self._wake = trio.Event()
            await self._begin_with_base_model()
            entry = self._next()
            if entry is None:
                await self._refuse_stranded()
                if self._behind() and trio.current_time() - last_ask > CATALOG_ASK_S:
                    last_ask = trio.current_time()
                    log.info("no known chain leads from %s to %s; asking for the catalog", self.shadow.version, self._current)
                    self._bad.clear()
                    self._ask_catalog()
                with trio.move_on_after(REPLAN_S):
                    await self._wake.wait()
                continue
            try:
                if entry.kind == "descriptor":
                    await self._fetch_descriptor(entry)
                else:
                    await self._install(entry)
            except Refusal as refusal:
                log.error("%s (keeping version %s)", refusal.at(version=entry.version), self.shadow.version)
                await self._give_up(entry, refusal)
            except (ShoalError, EngineDied, OSError, RuntimeError) as error:
                log.error("version %s not installed: %s (keeping %s)", entry.version, error, self.shadow.version)
                # What came of it stays; another way is tried first.
                self._bad.add(entry.mid)
                await trio.sleep(REPLAN_S)

    async def _begin_with_base_model(self) -> None:
        """Hold the base model that this node was given, as a version before all others: the catalog may have a way from there."""
        base, anchors = self._base_model, [e for e in self._entries.values() if e.kind == "anchor"]
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
        held = self.shadow.digest
        leads = any(held in (e.base_digest, e.state_digest) for e in self._entries.values())
        log.log(
            logging.INFO if leads else logging.WARNING, "base model in %s is %s", base.folder,
            "what this run began with: only the difference is downloaded" if leads else "not what this run began with",
        )  # fmt: skip

    def _behind(self) -> bool:
        if self._asleep:
            return False
        return self._current is not None and (self.shadow.version is None or self.shadow.version < self._current)

    def _ask_catalog(self) -> None:
        head = self._exchange.peers.get(self._exchange.head)
        if head is not None:
            head.post(GetCatalog())

    def _next(self) -> CatalogEntry | None:
        """The next manifest on the cheapest path; relabels the held state where the target has the same bits."""
        usable = [e for m, e in self._entries.items() if m not in self._bad]
        if not self._descriptor_done:
            return next((e for e in usable if e.kind == "descriptor"), None)
        if self._current is None or self._asleep:
            return None
        held = self.shadow.version
        # What is not past the held version cannot be begun, so no path leads over it.
        usable = [e for e in usable if e.kind != "descriptor" and (held is None or e.version > held)]
        targets = {e.version for e in usable}
        # The newest that can be reached: a broken link in a chain must not hold back the versions before it.
        for target in sorted(targets, reverse=True):
            path = plan_catch_up(usable, target, held, self.shadow.digest)
            if path:
                return path[0]
            same = [e for e in usable if e.version == target and e.state_digest and e.state_digest == self.shadow.digest]
            if path == [] and same:
                return CatalogEntry(same[0].mid, "same", target, None, b"", same[0].state_digest, 0)
        return None

    async def _refuse_stranded(self) -> None:
        """Say of every delta that cannot be installed here, since its base is unknown, that it is refused."""
        held = self.shadow.version
        if held is None or self._asleep:
            return
        known = {e.version for e in self._entries.values() if e.version > held}
        for mid, e in self._entries.items():
            if e.kind != "delta" or e.version <= held or e.base in known or mid in self._stranded | self._bad:
                continue
            self._stranded.add(mid)
            base, digest = f"version {e.base} ({e.base_digest.hex()[:16]})", (self.shadow.digest or b"").hex()[:16]
            reason = f"unknown base: delta is against {base}, held is version {held} ({digest})"
            refusal = Refusal(reason, peer=self._exchange.head, version=e.version)
            log.error("%s (keeping version %s)", refusal, held)
            await self._exchange.report(self._exchange.head, refusal)

    async def _give_up(self, entry: CatalogEntry, refusal: Refusal) -> None:
        self._bad.add(entry.mid)
        self._forget(entry.mid)
        await self._exchange.report(self._exchange.head, refusal.at(version=entry.version))

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
        if mid not in self._exchange.spreads:
            self._exchange.ask_manifest(mid, self._exchange.head)
        with trio.move_on_after(HEADER_S):
            await self._exchange.manifest(mid)
        if mid not in self._exchange.spreads:
            # The head has pruned it, or is away: drop the stale entry and look at a fresh catalog.
            self._entries.pop(mid, None)
            self._ask_catalog()
            raise ShoalError(f"manifest {mid.hex()[:12]} is not to be had any more")
        manifest = self._exchange.spreads[mid].manifest
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
        unpack_descriptor(np.asarray(state.tensor(TENSOR)).tobytes(), self.model_dir)
        self._descriptor_done = True
        self._entries.pop(manifest.mid, None)
        log.info("model descriptor is here")
        if self.shadow.version is not None and self.shadow.version > BEFORE_ALL:
            self._servable.set()

    async def _install(self, entry: CatalogEntry) -> None:
        started = trio.current_time()
        if entry.kind == "same":
            await self._relabel(entry)
            return
        manifest = await self._receive(entry)
        traffic = self._exchange.spreads[manifest.mid].traffic
        h = manifest.header
        staging = self.shadow.begin(h.version, h.kind, h.layout, h.base, h.base_digest, segment_bytes=h.segment_bytes)
        try:
            await decode_as_they_come(
                manifest.segments, lambda i: self._watched(manifest.mid, lambda: self._exchange.segment(manifest.mid, i)),
                lambda segment, payload: self._in_thread(staging.write, segment, payload),
            )  # fmt: skip
            sealed = await self._watched(manifest.mid, lambda: self._exchange.sealed(manifest.mid))
            state = await self._in_thread(staging.finish, sealed.seal.tensor_digests, sealed.seal.state_digest)
            transfer_s = trio.current_time() - started
            result = await self._commit(staging, state)
        except BaseException:
            staging.discard()
            raise
        self._keep(manifest.mid)
        await self._announce(result, sealed.seal.state_digest, transfer_s, traffic.from_head, traffic.from_peers)

    async def _commit(self, staging: Staging, state: StateFile) -> CommitResult:
        """Engine first, shadow second. If the engine cannot, both stay. If only the shadow cannot (a full disk), the
        engine is ahead of it until the next commit, which then copies everything."""
        async with self._engine_lock:
            result = CommitResult(state.version, 0.0, 0.0)
            if self._engine is not None:
                assert staging.held is not None
                result = await self._into_engine(self._engine, state, staging.held.digest)
            await self._in_thread(self.shadow.commit, staging)
            if self._engine is not None:
                self.serving = state.version
        return result

    async def _into_engine(self, engine: Engine, state: StateFile, digest: bytes) -> CommitResult:
        """Swap `state`, which has `digest`, into the engine. What changed is told against the held state, so it is
        only believed while the engine holds that one too."""
        if self._engine_holds is None or self._engine_holds != self.shadow.digest:
            state = replace(state, changed=None)
        self._engine_holds = None
        await engine.stage(state)
        async with self._before_commit(state.version):
            result = await engine.commit()
        if self._engine is engine:  # else it died meanwhile, and another one may have been loaded
            self._engine_holds = digest
        return result

    async def _relabel(self, entry: CatalogEntry) -> None:
        """The target has the very bits that are held (a learner that resumed): nothing to download."""
        async with self._engine_lock:
            self.shadow.adopt(entry.version, entry.state_digest)
            result = CommitResult(entry.version, 0.0, 0.0)
            if self._engine is not None:
                held = replace(self.shadow.state_file(), changed=())
                result = await self._into_engine(self._engine, held, entry.state_digest)
                self.serving = entry.version
        log.info("held state is version %s already", entry.version)
        await self._announce(result, entry.state_digest, 0.0, 0, 0)

    async def _announce(self, result: CommitResult, digest: bytes, transfer_s: float, head: int, peers: int) -> None:
        self._exchange.floor = self.shadow.version
        self._servable.set()
        await self._on_installed(Installed(result.version, digest, result.pause_s, result.apply_s, transfer_s, head, peers))

    def _keep(self, mid: bytes) -> None:
        """An installed manifest goes on being relayed for a while, then makes room."""
        self._entries.pop(mid, None)
        if mid in self._exchange.spreads:  # a new epoch may have swept it away meanwhile
            self._kept.append(mid)
        if self.shadow.version is not None:
            self._forget_superseded(self.shadow.version, but=mid)
        while len(self._kept) > KEEP:
            self._forget(self._kept[0])

    def _forget_superseded(self, version: Version, *, but: bytes) -> None:
        """Drop manifests that an anchor overtook: nobody here will install them, and their number is limited."""
        for mid, spread in list(self._exchange.spreads.items()):
            m = spread.manifest
            if m.header.kind != "descriptor" and m.version <= version and mid != but and mid not in self._kept:
                self._forget(mid)
                self._entries.pop(mid, None)
        self._stranded &= self._entries.keys()
        self._bad &= self._entries.keys()
