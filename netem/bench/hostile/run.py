"""One run of `shoal bench hostile`: the demo's model through real processes over loopback, with nodes that cheat among them.

A cheat that is expelled comes again as somebody else: the run's ticket brings any number of identities. Must not know other runs.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from learner.config import build_config, dump_toml
from learner.status.source import fetch_status
from learner.status.steps import read_metrics, surviving
from netem.bench.hostile.cheats import CHEATS
from netem.bench.hostile.spent import SpentByKind, cores_taken
from netem.demo.recipes import RECIPES
from netem.processes.children import POLITE_S, Children, LoggedProcess, run_module, wait_for
from netem.processes.forked import fork_module, warm_up
from p2p.errors import ShoalError, UsageError
from p2p.identity import Identity

RECIPE = RECIPES["reverse"]

SHARE = 96
"""Sequences at once of a third of the capacity: of one honest node, and of all cheats together."""

AGAIN_S = 2.0
"""From an expulsion to the cheat's next identity."""

LATER_S, LATER_STEPS = 30.0, 10
"""Seconds after which a run's pace is to be nearly that of honest nodes, and steps of which it is measured at the least."""

START_S = 300.0
"""Until all is there, on a machine with much else to do."""

RUN_S = 1800.0
"""The longest run: only one that hangs reaches it."""

WATCHED, ROGUE, FINAL = "netem.bench.hostile.watched", "netem.bench.hostile.rogue_node", "netem.bench.hostile.final"
"""Modules that are started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileRun:
    """`honest` nodes of SHARE sequences each, and with `hostile` one node of each cheat, which have SHARE together."""

    honest: int
    hostile: bool
    seed: int
    steps: int
    settings: tuple[str, ...] = ()
    """further settings of the learner, SECTION.KEY=VALUE"""


@dataclass
class ComingCheat:
    """One cheat's identities."""

    name: str
    peers: list[str] = field(default_factory=list)
    process: LoggedProcess | None = None
    folder: Path = Path()
    again_at: float = 0.0


def settings_of(run: HostileRun, run_dir: Path, model: Path) -> dict[str, Any]:
    """What the learner is configured with: the demo's settings, but strangers are strangers."""
    values = RECIPE.config(run_dir, model, run.steps, run.seed)
    values["trainer"]["eval_size"] = 0  # nodes answer evaluations; the policy is looked at by itself at the end
    values["standing"] = {"trusted": []}
    return values


class HostileSwarm:
    """The run's processes. Leaving its `with` block ends them."""

    def __init__(self, run: HostileRun, folder: Path, say: Callable[[str], None]) -> None:
        self.run, self.folder, self.say = run, folder, say
        self.run_dir, self.model, self.taps = folder / "run", folder / "model", folder / "learner.taps"
        folder.mkdir(parents=True, exist_ok=True)
        self.children = Children(folder / "logs")
        self.cheats = [ComingCheat(name) for name in CHEATS] if run.hostile else []
        self.honest: dict[str, LoggedProcess] = {}
        self._spent = SpentByKind()
        self._read = 0
        self._taps: list[list[Any]] = []

    def __enter__(self) -> HostileSwarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.children.end(POLITE_S)

    def go(self) -> dict[str, Any]:
        """From the model to the result, as plain values. ShoalError when a process that should live ends."""
        run = self.run
        run_module("netem.demo.recipes", str(self.model), RECIPE.name, str(run.seed), timeout_s=RUN_S)
        values = settings_of(run, self.run_dir, self.model)
        config = self.folder / "learner.toml"
        config.write_text(dump_toml(build_config(values, "bench hostile").model_dump()))
        more = [part for pair in run.settings for part in (f"--{pair.partition('=')[0]}", pair.partition("=")[2])]
        began, cpu = time.monotonic(), os.getloadavg()[0]
        learner = self.children.start("learner", str(self.taps), "learner", str(config), "--json", *more, module=WATCHED)
        wait_for("a learner", lambda: self._status() is not None, START_S, [learner])
        warm_up()
        for i in range(run.honest):
            self.honest[f"honest-{i}"] = self._start(f"honest-{i}", SHARE, "shoal")
        for cheat in self.cheats:
            self._come(cheat)
        while learner.poll() is None:
            self._look()
            if self._spent.due():
                nodes = {node.pid: "honest" for node in self.honest.values()}
                cheats = {cheat.process.pid: "cheats" for cheat in self.cheats if cheat.process is not None}
                self._spent.look({learner.pid: "learner"} | nodes | cheats)
            if time.monotonic() - began > RUN_S:
                raise ShoalError(f"the run was not over after {RUN_S:.0f} s")
            time.sleep(0.2)
        if learner.returncode != 0:
            raise ShoalError(f"the learner ended with status {learner.returncode}: {learner.last_line()}")
        self._look()
        return self._result(time.monotonic() - began, cpu)

    def _start(self, name: str, capacity: int, module: str, *before: str) -> LoggedProcess:
        return self.children.start(
            name, *before, "node", "--join", str(self.run_dir / "ticket.txt"), "--dir", str(self.folder / name), "--listen",
            "/ip4/127.0.0.1/tcp/0", "--name", name, "--capacity", str(capacity), "--json", module=module, starter=fork_module,
        )  # fmt: skip

    def _come(self, cheat: ComingCheat) -> None:
        """As a new identity, under a name that says nothing."""
        number = list(CHEATS).index(cheat.name)
        name = f"guest-{number}-{len(cheat.peers)}"
        cheat.folder, cheat.again_at = self.folder / name, 0.0
        cheat.folder.mkdir()
        cheat.peers.append(Identity.load_or_create(cheat.folder / "node.key").peer_id)
        seed = str(self.run.seed * 1000 + len(cheat.peers))
        cheat.process = self._start(name, SHARE // len(CHEATS), ROGUE, cheat.name, seed)

    def _status(self) -> dict[str, Any] | None:
        try:
            status = fetch_status(self.run_dir)
        except UsageError:
            return None
        return None if status["finished"] else status

    def _look(self) -> None:
        """What the head learned since, and who comes again."""
        for name, node in self.honest.items():
            if node.failed():
                raise ShoalError(f"{name} ended with status {node.returncode}: {node.last_line()}")
        with open(self.taps, "rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self._taps += new
        now = time.monotonic()
        for tap in new:
            if tap[0] == "expelled":
                self.say(f"expelled: {self._who(tap[1])}: {tap[2]}")
        gone = {tap[1] for tap in new if tap[0] == "expelled"}
        for cheat in self.cheats:
            if cheat.peers[-1] in gone and cheat.process is not None:
                cheat.process.send(signal.SIGKILL)
                cheat.process, cheat.again_at = None, now + AGAIN_S
            elif cheat.again_at and now >= cheat.again_at:
                self._come(cheat)

    def _who(self, peer: str) -> str:
        return next((c.name for c in self.cheats if peer in c.peers), "honest")

    def _result(self, seconds: float, load: float) -> dict[str, Any]:
        rows = [row for row in surviving(read_metrics(self.run_dir / "metrics.jsonl")) if "exact/mean" in row]
        tokens, expelled = defaultdict[str, int](int), defaultdict[str, int](int)
        per_identity = defaultdict[str, int](int)
        for tap in self._taps:
            if tap[0] == "trained":
                for peer, (count, _) in tap[1].items():
                    tokens[self._who(peer)] += int(count)
                    per_identity[peer] += int(count)
        for peer in {tap[1] for tap in self._taps if tap[0] == "expelled"}:  # what it made before may be found once more
            expelled[self._who(peer)] += 1
        last, times = max(1, len(rows) // 10), [row["time"] for row in rows]
        checkpoint = self.run_dir / "checkpoints" / f"step_{self.run.steps}"
        child = self.children.start("final", str(self.model), str(checkpoint), str(self.run.seed), module=FINAL)
        child.wait(RUN_S)
        final = self.children.result("final")
        return {
            "steps": len(rows), "reward_last": fmean(r["exact/mean"] for r in rows[-last:]),
            "reward": [round(r["exact/mean"], 3) for r in rows],
            "final_sampled": final["sampled"], "final_greedy": final["greedy"],
            "tokens": dict(tokens), "expelled": dict(expelled),
            "identities": {c.name: [per_identity[p] for p in c.peers] for c in self.cheats},
            "seconds": round(seconds, 1), "train_s": round(times[-1] - times[0], 1),
            "later_step_s": _later_step_s(times), "later_cores": cores_taken(self._spent.looks, times[0] + LATER_S, times[-1]),
            "load": [load, os.getloadavg()[0]],
        }  # fmt: skip


def _later_step_s(times: Sequence[float]) -> float | None:
    """Seconds of a step once LATER_S went by since the first; None where hardly any step is later."""
    later = [time for time in times if time >= times[0] + LATER_S]
    return round((later[-1] - later[0]) / (len(later) - 1), 3) if len(later) > LATER_STEPS else None


def hostile_run(run: HostileRun, folder: Path, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Its result. The folder is left as it is."""
    with HostileSwarm(run, folder, say) as running:
        return running.go()
