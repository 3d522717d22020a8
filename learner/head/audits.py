"""Audits as a part of a run: what ended goes to the plan, what the plan chose to the auditor, what was found to the standing.

A thin shell. It starts the auditor when the first node comes whose completions are all checked, or with the first completion
that is chosen, brings it to the versions under which something is to be scored, and starts it again when it dies; after a few
deaths in a row it gives audits up, says so, and the run goes on. Must not know how a completion is scored.

A run without audits has no object of this class: then nothing is chosen, kept or counted.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import trio

from learner.audit.calibration import Calibration, NodeArithmetic, read_arithmetic
from learner.audit.claims import OwnGroup
from learner.audit.judged import Judged, that_count
from learner.audit.opening import path_through, path_to_window
from learner.audit.plan import AuditPlan, Check, ToldKind
from learner.audit.wire import follow_request, read_bfloat16, read_deviations, score_request
from learner.client.whole_states import whole_state
from learner.head.auditor_process import AuditorGone, AuditorProcess, AuditorRefused
from learner.head.node_state import NodeState
from learner.head.trust import Trust
from learner.publish.published import Published
from learner.publish.publisher import Publisher
from learner.rollouts.group import RunningGroup
from learner.rollouts.probe import Probe
from learner.trajectory import Group
from p2p.protocol.versions import Catalog, CatalogEntry
from p2p.swarm import Swarm
from p2p.version import Version

DEATHS = 3
"""Deaths of the auditor without an answer in between after which audits are given up."""

AGAIN_S = (1.0, 30.0)
"""Seconds before it is started again: doubled with each death up to the second number."""

BATCH_TOKENS = 4_096
"""Tokens that the auditor is asked for at once, one completion at least: a version is not kept waiting for long."""

GATHER_S = 1.0
"""Seconds that the auditor, when it has nothing to do, lets completions gather after the first of a node that is not proven, or
was doubted: one by one each would cost it a forward of its own and a walk between versions. A node is found that much later."""

HURRY_GATHER_S, HURRY_S = 0.1, 60.0
"""The same on alert, and where the trainer waits for it so many seconds after any node was found wrong."""

PROVEN_GATHER_S = 10.0
"""The same where only proven nodes' completions wait. It ends sooner when no more can come under the oldest version that is
waited for, or when as many tokens wait as are asked for at once."""

MOST_LAG = 32
"""Versions that the auditor's state may be behind while nothing is to be checked: half of what a node may. Beyond it the chunks
are not kept for it any more, and it begins anew from a whole state when it must."""

SECRET_BYTES = 32
"""Of the key by which completions are chosen. It is made anew with each life of the learner, and never leaves it."""

MOST_WINDOW = 64
"""Versions behind the newest of which states are held at the most, whatever `rollout.max_staleness` allows."""

log = logging.getLogger("shoal.audit")


class AuditedRun(Protocol):
    """The parts of a run that audits rest on, as the head holds them."""

    epoch: int
    run_dir: Path
    trust: Trust
    publisher: Publisher
    swarm: Swarm
    nodes: dict[str, NodeState]


class Audits:
    """`start()` makes an auditor's process. `share`: of a proven node's completions, what is checked. `window`: versions whose
    states are held. `device`: the kind of device that the auditor computes on. `own_groups()`: what it may answer itself."""

    def __init__(
        self, run: AuditedRun, start: Callable[[], AuditorProcess], calibration: Calibration, *, share: float, window: int,
        false_alarm: float, device: str = "cpu", own_groups: Callable[[], Sequence[OwnGroup]] = tuple,
    ) -> None:  # fmt: skip
        self._run, self._start, self._window, self._own_groups = run, start, window, own_groups
        self.plan = AuditPlan(
            secrets.token_bytes(SECRET_BYTES), run.epoch, run.trust.standing, calibration, kind_of=self._kind_of,
            false_alarm=false_alarm, calibrates=lambda: self._process is not None, on_alert=run.trust.on_alert,
            own_kind=NodeArithmetic("transformers", "bfloat16", device),
        )  # fmt: skip
        self._process: AuditorProcess | None = None
        self._held: CatalogEntry | None = None
        """what the auditor took last: the newest version that it has"""
        self.reads_from: Version | None = None
        """the oldest version of which the auditor still reads chunks"""
        self._work = trio.Event()
        self._facts: dict[str, Any] = {}
        self._spent_s = 0.0
        """processor time of auditors that are gone"""
        self.over = ""
        """why audits were given up; "" while they go on"""
        self._found_at = -math.inf
        """when something was found wrong last"""
        self.starts = self._answers = 0
        run.trust.checks(True, share)

    # ---- what happens in the run

    def joined(self) -> None:
        """A node takes part from here on. An auditor takes seconds to start: it shall not be begun when the first of a stranger's
        completions is trained on already."""
        if not self.over:
            self._work.set()

    def whole(self, group: Group) -> None:
        """A group's completions have ended."""
        if not self.over:
            self.plan.whole(group)
            if self.plan.waiting:
                self._work.set()

    def waited_for(self, groups: Iterable[RunningGroup]) -> None:
        """The trainer waits for these: some of them are checked as far as they were made (`AuditPlan.looks_at`)."""
        if not self.over:
            self.plan.waited_for(groups, 2 * BATCH_TOKENS)
            if self.plan.waiting:
                self._work.set()

    @property
    def has_room(self) -> bool:
        """Whether the auditor would soon come to what is given to it now."""
        return self._process is not None and self.plan.waiting_tokens < BATCH_TOKENS

    def probe(self, probe: Probe) -> None:
        """There is more of a probe, or it is over."""
        if not self.over and self.plan.probe(probe):
            self._work.set()

    def sealed(self, published: Published) -> bool:
        """A version is out. Whether the auditor would rather have its state whole: it is looked at, those before it were not, and
        what they changed is as much as a whole state."""
        if published.kind != "delta":
            return False
        passed = self.plan.published(published.version, published.size)
        self._work.set()
        # An auditor that has no state yet begins with a newer one.
        dense = passed and passed >= self._run.publisher.published.anchor_bytes
        return bool(dense) and self._held is not None and not self._checks_all_of_somebody()

    # ---- the auditor

    async def run(self) -> None:
        """Until audits are given up. sqlite3.Error when what follows a verdict cannot be written down: the run must end."""
        deaths, pause = 0, AGAIN_S[0]
        while not self.over:
            await self._due()
            answered = self._answers
            try:
                await self._live()
            except AuditorRefused as refusal:
                self._give_up(f"the auditor cannot work: {refusal}")
            except AuditorGone as gone:
                deaths = deaths + 1 if self._answers == answered else 1
                pause = pause if deaths > 1 else AGAIN_S[0]
                if deaths >= DEATHS:
                    self._give_up(f"the auditor died {deaths} times in a row, the last time because: {gone}")
                    return
                log.warning("the auditor is gone (%s); another one in %.0f s", gone, pause)
                await trio.sleep(pause)
                pause = min(2 * pause, AGAIN_S[1])

    async def _due(self) -> None:
        while not self.plan.waiting and not self._checks_all_of_somebody():
            await self._wait()

    def _checks_all_of_somebody(self) -> bool:
        return any(self.plan.all_of(peer) for peer in self._run.nodes)

    async def _wait(self) -> None:
        await self._work.wait()
        self._work = trio.Event()

    async def _live(self) -> None:
        """One auditor, from its start to its end. AuditorGone or AuditorRefused."""
        self.starts += 1
        self._process = process = self._start()
        try:
            log.info("audits begin: the auditor is process %d", process.process.pid)
            self._facts = await process.ready()
            if self._run.publisher.current is not None:
                await self._bring(process, {self._run.publisher.current})
            while True:
                await self._gather()
                while batch := self.plan.next(BATCH_TOKENS):
                    await self._check(process, batch)
        finally:
            self._spent_s += float(self._facts.get("cpu_s", 0.0))
            self._process, self._held, self.reads_from, self._facts = None, None, None, {}
            process.end()

    async def _gather(self) -> None:
        """Until it is time to check what waits."""
        began: float | None = None
        while not self.plan.urgent:
            self._let_go()
            if not self.plan.waiting:
                began = None
                await self._wait()
                continue
            began = trio.current_time() if began is None else began
            left = began + PROVEN_GATHER_S - trio.current_time()
            if left <= 0 or self.plan.waiting_tokens >= BATCH_TOKENS or self._no_more_come():
                return
            with trio.move_on_after(left):
                await self._wait()
        await trio.sleep(HURRY_GATHER_S if self._hurries() else GATHER_S)

    def _hurries(self) -> bool:
        """Whether the trainer waits for what may be wrong."""
        lately = trio.current_time() - self._found_at < HURRY_S
        return self.plan.on_alert() or (lately and self.plan.first_tokens > 0)

    def _no_more_come(self) -> bool:
        """Whether the oldest version that is waited for is so old that no completion goes on under it."""
        current = self._run.publisher.current
        return current is not None and current.step - min(self.plan.waits_for()).step >= self._window - 1

    def _let_go(self) -> None:
        """Have no chunks kept for an auditor that nobody needed for long."""
        current = self._run.publisher.current
        if self._held is not None and current is not None and current.step - self._held.version.step > MOST_LAG:
            self._held = self.reads_from = None

    async def _check(self, process: AuditorProcess, batch: list[Check]) -> None:
        cannot = str(self._facts.get("cannot", ""))
        own = 0 if cannot else self.plan.wants_own(batch)
        groups = self._own_groups() if own else ()
        try:
            await self._bring(process, {part.version for check in batch for part in check.parts})
            answer = await process.ask(score_request(batch, own, groups))
            found = read_deviations(answer, batch)
            if self.plan.own(read_bfloat16(answer, own)):
                log.info("the auditor has measured what bfloat16 does to this model: nodes of kinds that no trusted node stands "
                         "for are held to that")  # fmt: skip
        except (ValueError, TypeError) as error:
            self.plan.lost(batch)
            raise AuditorGone(f"its answer cannot be read: {error}") from None
        except (AuditorGone, AuditorRefused):
            self.plan.lost(batch)
            raise
        self._facts = answer | {"found": None, "bfloat16": None}
        self._answers += 1
        if not cannot and answer.get("cannot"):
            log.warning("the auditor cannot answer prompts itself (%s): where nobody of their kind is trusted, nodes in bfloat16 "
                        "are held to the wide bounds that are shipped", answer["cannot"])  # fmt: skip
        for judged in that_count(j for check, of in zip(batch, found, strict=True) for j in self.plan.found(check, of)):
            self._judge(judged)

    async def _bring(self, process: AuditorProcess, wanted: set[Version]) -> None:
        """Have it follow as far as the newest of these, by way of all that it will be asked about."""
        for _ in range(2):
            catalog = self._run.publisher.catalog()
            if catalog is None or (self._held is not None and max(wanted) <= self._held.version):
                return
            if self._held is not None and await self._go_on(process, catalog, wanted):
                return
            path = path_to_window(catalog, self._window)
            self.reads_from = path[0].version if path else None
            if await self._take(process, path):
                return
            log.info("the auditor fell behind: it begins anew from a whole state")
            self._held = self.reads_from = None

    async def _go_on(self, process: AuditorProcess, catalog: Catalog, wanted: set[Version]) -> bool:
        """From where it stands: to each version where it must stop by its whole state, if that lies there, or by differences.
        False where neither leads there."""
        assert self._held is not None
        for stop in sorted(self._stops(catalog, self._held.version, wanted)):
            if await self._jump(process, catalog, stop):
                continue
            path = path_through(catalog, self._held, [stop])
            if path is None or not await self._take(process, path):
                return False
        return True

    async def _jump(self, process: AuditorProcess, catalog: Catalog, version: Version) -> bool:
        """Whether it took a version from its whole state."""
        file = whole_state(self._run.run_dir, version)
        entry = next((e for e in catalog.entries if e.version == version and e.kind == "delta" and e.state_digest), None)
        transfer = self._run.swarm.transfers.get(entry.mid) if entry is not None else None
        if entry is None or transfer is None or not transfer.manifest.whole or not file.exists():
            return False
        answer = await process.ask(follow_request(transfer.manifest.parts(), str(file)))
        if lost := answer.get("lost"):
            log.warning("the auditor goes by differences: %s", lost)
            return False
        self._held, self.reads_from = entry, entry.version
        return True

    def _stops(self, catalog: Catalog, held: Version, wanted: set[Version]) -> set[Version]:
        """The versions up to the newest of `wanted` at which it must stop: what is asked now, what waits, and of those that
        completions may still go on under the ones that are looked at: all, while anybody is not proven."""
        known = sorted({entry.version for entry in catalog.entries if entry.version <= catalog.current})
        every = self._checks_all_of_somebody()
        looked_at = {v for v in known[-self._window :] if every or self.plan.versions.times(v)}
        stops = looked_at | wanted | self.plan.waits_for()
        return {v for v in known if held < v <= max(wanted) and v in stops}

    async def _take(self, process: AuditorProcess, path: list[CatalogEntry]) -> bool:
        """Have it take these in order. False when one of them is not kept any more."""
        for entry in path:
            transfer = self._run.swarm.transfers.get(entry.mid)
            if transfer is None or not transfer.manifest.whole:
                return False
            answer = await process.ask(follow_request(transfer.manifest.parts()))
            if lost := answer.get("lost"):
                raise AuditorGone(f"it cannot follow to version {entry.version}: {lost}")
            self._held, self.reads_from = entry, entry.version
        return True

    def _judge(self, judged: Judged) -> None:
        node, tokens, verdict, whole = judged
        if verdict.gross or verdict.caught:
            self._found_at = trio.current_time()
        if not verdict.caught:
            if not verdict.gross:
                self._run.trust.standing.checked(node, tokens, whole=whole)
            if verdict.gross:  # one in each completion is all that it takes to make completions long, or to change what they say
                why = f"audits: {verdict.gross} of its tokens are not what its seed draws"
                self._run.trust.odd(node, why, trio.current_time())
                self.plan.drop(node)  # it is made again
                self.plan.remade(node)
            elif verdict.notable:
                self._run.trust.standing.recheck(node)
            return
        self.plan.drop(node)
        self.plan.remade(node)
        if self._run.trust.barred_s(node, 0.0):  # of a completion of its that others go on with
            self._run.trust.odd(node, f"audits: {verdict.why}", trio.current_time())
        else:
            self._run.trust.caught(node, f"audits: {verdict.why}")

    def _give_up(self, why: str) -> None:
        """Nothing is checked from here on. What a node delivers alone proves it, as in a run without audits: else nobody who is
        on trial would ever be proven, and the run would be as slow as its strangers may be together."""
        self.over = why
        self.plan.drop()
        self._run.trust.checks(False)
        log.error("audits have ended, and the run goes on without: %s. What nodes generate is not checked any more; nodes are "
                  "proven by what they deliver alone", why)  # fmt: skip

    def _kind_of(self, peer: str) -> ToldKind | None:
        node = self._run.nodes.get(peer)
        if node is None or not node.arithmetic:  # gone, or here again and without an engine: what it said before counts
            return None
        return ToldKind(read_arithmetic(node.arithmetic), node.keeps)

    # ---- what a person sees

    @property
    def spent_s(self) -> float:
        """Processor time of all auditors of this life of the learner."""
        return self._spent_s + float(self._facts.get("cpu_s", 0.0))

    def metrics(self) -> dict[str, float]:
        """For the step's line of metrics.jsonl: counts since this learner began."""
        counts, back = self.plan.counts, self._run.trust.taken
        return {
            "audit/checked_tokens": counts["checked"], "audit/calibrated_tokens": counts["calibrated"],
            "audit/unchecked_tokens": counts["dropped"] + counts["unknown"], "audit/waiting": self.plan.waiting,
            "audit/probe_tokens": counts["probed"], "audit/caught": counts["caught"], "audit/seconds": self.spent_s,
            "audit/remade_groups": back.groups, "audit/remade_tokens": back.tokens,
        }  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Plain values for the status page."""
        counts = self.plan.counts
        state = "ended" if self.over else "checking" if self._process is not None else "nothing to check yet"
        return {
            "state": state, "why": self.over, "checked": counts["checked"], "calibrated": counts["calibrated"],
            "unchecked": counts["dropped"] + counts["unknown"], "dropped": counts["dropped"], "unknown": counts["unknown"],
            "probed": counts["probed"], "caught": counts["caught"], "waiting": self.plan.waiting,
            "seconds": self.spent_s, "starts": self.starts, "pid": self._process.process.pid if self._process else 0,
            "versions": self._facts.get("versions", 0), "undo_bytes": self._facts.get("undo_bytes", 0),
            "rss_bytes": self._facts.get("rss_bytes", 0),
            "calibration": {str(kind): means.off for kind, means in self.plan.calibration.means.items()},
        }  # fmt: skip
