"""`shoal bench capacity`: does the learner wait just where the capacity model says so?

Real head, real nodes, real libp2p over emulated links; engines and trainer take the time that they are told, so that two cores
are enough. The nodes make a given multiple of what the learner needs; measured is the share of its time that it waited, beside
what `learner.economy.demand` says from the rates, times and tokens that the head itself measured.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from learner.config import build_config, dump_toml
from netem.bench.capacity.paced import Paced
from netem.demo.spot import Counts, Spot
from netem.emulation.underlay import Underlay, underlay
from netem.networks.profile import LEARNER, build_profile
from netem.processes.children import Children, LoggedProcess, run_module, start_module, wait_for
from p2p.errors import ShoalError, UsageError

MODEL_BUILDER = "netem.demo.tiny_model"
"""The module that makes the model, in a process of its own: it imports torch, which this one is better without."""

TRAINER = "netem.bench.capacity.paced"
"""The module of a trainer that takes the time that it is told."""

MAX_NEW_TOKENS = 96
"""Most tokens of a completion: short, so that steps are."""

MEAN_TOKENS = 41.0
"""Mean tokens of a completion: the fake engine ends one with probability 1/48 at each token, or at MAX_NEW_TOKENS."""

FLOOR_S = 0.1
"""Shortest turn of the learner's local engine in seconds: steps are short here."""

PORT = 4001
"""TCP port of every host: each has an address of its own."""


END_S = 10.0
"""How long nodes may take to hand over and leave when the run is over."""


@dataclass(frozen=True, slots=True)
class CapacityCase:
    """One run. `factor`: what the nodes make over what the learner needs."""

    factor: float
    nodes: int = 4
    steps: int = 30
    warm: int = 6
    """steps that are not counted"""
    train_s: float = 3.0
    staleness: int = 3
    groups: int = 8
    samples: int = 8
    rows: int = 8
    """sequences an engine decodes at once"""
    values: int = 8_000_000
    changed: float = 0.05
    link: str = "home-cable"
    spot_up_s: float = 0.0
    """nodes come and go: there for so long in the mean, and away for half of it; 0: they stay"""
    seed: int = 0
    local_engine: float = 0.0
    """tokens per second of the learner's local engine in its turns, over what the learner needs; 0: it has none"""

    def __post_init__(self) -> None:
        if not self.factor > 0 or min(self.nodes, self.groups, self.samples, self.rows) < 1 or not 1 <= self.warm < self.steps:
            raise UsageError("factor, nodes: above 0; steps: more than the six that do not count")
        if not 0 <= self.local_engine < float("inf"):
            raise UsageError(f"--local-engine: {self.local_engine:g} is not how fast an engine is; 0 for none")

    @property
    def needed(self) -> float:
        """Tokens per second that the learner consumes when it never waits."""
        return self.groups * self.samples * MEAN_TOKENS / self.train_s

    @property
    def step_s(self) -> float:
        """Seconds of an engine's decoding step, one token for each of its sequences."""
        return self.nodes * self.rows / (self.factor * self.needed)

    def foretold(self, supply: float, train_s: float) -> float:
        """The share of its time that the trainer leaves the device to the learner's local engine, when turns are as long as they
        have to be: what nodes make in a step, and that engine in its turn, is what the step takes."""
        turn = max(0.0, (self.needed * self.train_s - supply * train_s) / (supply + self.local_engine * self.needed))
        return turn / (train_s + turn)

    @property
    def horizon_s(self) -> float:
        """Seconds after which a run is given up; longer than it takes."""
        return 120.0 + 4 * self.steps * self.train_s / min(1.0, self.factor)


class Run:
    """One case on its own network."""

    def __init__(self, root: Path, model: Path, case: CapacityCase, net: Underlay) -> None:
        self.root, self.case, self.net, self.run_dir = root, case, net, root / "run"
        self.children = Children(root)
        self.moves = Counts()
        values: dict[str, Any] = {
            "run_dir": str(self.run_dir), "model": str(model), "external_trainer": True,
            "rollout": {"max_staleness": case.staleness, "groups_per_step": case.groups, "samples": case.samples,
                        "max_new_tokens": MAX_NEW_TOKENS, "micro_batch_groups": 1},
            "swarm": {"listen": [f"/ip4/{net.addresses[LEARNER]}/tcp/{PORT}"]},
            "trainer": {"steps": case.steps},
        }  # fmt: skip
        if case.local_engine:
            rows = case.groups * case.samples // 2
            step_s = {"step_s": rows / (case.local_engine * case.needed)}
            values["local_engine"] = {"engine": "fake", "capacity": rows, "engine_set": step_s, "floor_s": FLOOR_S}
        (root / "learner.toml").write_text(dump_toml(build_config(values, "bench").model_dump()))

    def start(self, name: str, host: str, *arguments: str, module: str = "shoal") -> LoggedProcess:
        """`python -m MODULE ARGUMENTS` on `host`."""
        on_host = partial(start_module, prefix=self.net.command(host, []))
        return self.children.start(name, *arguments, module=module, starter=on_host)

    def start_node(self, name: str) -> LoggedProcess:
        """On the host of that name."""
        return self.start(
            name, name, "node", "--join", str(self.run_dir / "ticket.txt"), "--name", name, "--dir",
            str(self.root / name), "--listen", f"/ip4/{self.net.addresses[name]}/tcp/{PORT}", "--capacity", str(self.case.rows),
            "--engine", "fake", "--engine-set", f"step_s={self.case.step_s}", "--json",
        )  # fmt: skip

    def come_and_go(self, learner: LoggedProcess) -> None:
        """Nodes by the trace, until the learner has ended."""
        c, began = self.case, time.monotonic()
        spot = Spot(
            c.nodes, c.seed, self.start_node, lambda line: None, up_s=c.spot_up_s, down_s=c.spot_up_s / 2, horizon_s=c.horizon_s
        )
        self.moves = spot.counts
        while learner.poll() is None and time.monotonic() < began + c.horizon_s:
            spot.go_on()
            time.sleep(0.2)

    def go(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. ShoalError when it does not get there."""
        c = self.case
        try:
            learner = self.start("learner", LEARNER, "learner", str(self.root / "learner.toml"), "--json")
            wait_for("a ticket", (self.run_dir / "ticket.txt").exists, 120)
            if not c.spot_up_s:
                for i in range(c.nodes):
                    self.start_node(f"node-{i + 1}")
            paced = Paced(c.steps, c.train_s, c.values, c.changed)
            self.start("trainer", LEARNER, str(self.run_dir), json.dumps(asdict(paced)), module=TRAINER)
            if c.spot_up_s:
                self.come_and_go(learner)
            if learner.wait(timeout=c.horizon_s):
                raise ShoalError(f"the learner ended badly:\n{self.children.said('learner')[-2000:]}")
        finally:
            self.children.end(END_S)
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line.get("step", 0) > c.warm and "pool/waited_s" in line]


def account(case: CapacityCase, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the steps that count: how long the learner waited, and what was foretold of it."""
    took = lines[-1]["time"] - lines[0]["time"]
    waited = sum(line["pool/waited_s"] for line in lines[1:])
    of = lambda key: median(line[f"pool/{key}"] for line in lines)
    predicted = mean(line["pool/stall_predicted"] for line in lines[1:])
    turns = {}
    if case.local_engine:
        predicted = case.foretold(of("supply_tokens_per_s"), of("train_s"))
        keys = "seconds", "trainer_wait_s", "remote_wait_s"
        turns = {key: mean(line[f"local_engine/{key}"] for line in lines[1:]) for key in keys}
    return asdict(case) | turns | {
        "waited": waited / took, "predicted": predicted,
        "supply_tokens_per_s": of("supply_tokens_per_s"), "required_tokens_per_s": of("required_tokens_per_s"),
        "step_s": took / (len(lines) - 1), "measured_train_s": of("train_s"), "spread_s": of("spread_s"),
        "generation_s": of("generation_s"), "kappa": of("kappa"),
        "delta_bytes": next((line["broadcast/bytes"] for line in reversed(lines) if "broadcast/bytes" in line), None),
    }  # fmt: skip


def bench_capacity(
    factors: Sequence[float], case: CapacityCase, backend: str, folder: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """What `shoal bench capacity --json` prints."""
    results = []
    with tempfile.TemporaryDirectory(prefix="shoal-capacity-", dir=folder) as name:
        root = Path(name)
        run_module(MODEL_BUILDER, str(root / "model"), "1")
        for i, factor in enumerate(factors):
            one = replace(case, factor=factor)
            profile = build_profile(
                {"learner": {"preset": one.link}, "nodes": [{"name": "node", "count": one.nodes, "preset": one.link}]}, "bench",
                f"capacity-{i}",
            )  # fmt: skip
            (root / str(i)).mkdir()
            with underlay(profile, backend) as net:
                began = time.monotonic()
                run = Run(root / str(i), root / "model", one, net)
                found = account(one, run.go())
            found |= {"left": run.moves.noticed, "killed": run.moves.killed}
            results.append(found)
            say(describe_one(found) + f" ({time.monotonic() - began:.0f} s)")
    return {"cases": results, "ok": all(_as_foretold(r) for r in results)}


def _as_foretold(r: dict[str, Any]) -> bool:
    """Below 3 % where nothing is foretold, else within 5 points; below 10 % where nodes come and go. A local engine's turns
    count as waiting."""
    if r["spot_up_s"]:
        return r["waited"] < 0.1
    return r["waited"] < 0.03 if r["factor"] >= 1 and not r["local_engine"] else abs(r["waited"] - r["predicted"]) < 0.05


def describe_one(r: dict[str, Any]) -> str:
    return (
        f"{r['factor']:.2f} x what is needed: {r['supply_tokens_per_s']:.0f} of {r['required_tokens_per_s']:.0f} tokens/s, "
        f"the learner waited {100 * r['waited']:.1f} % of its time, foretold {100 * r['predicted']:.1f} %; "
        f"S={r['staleness']}, kappa={r['kappa']:.0f}, a version takes {r['spread_s']:.2f} s, a group {r['generation_s']:.1f} s, "
        f"a step {r['step_s']:.2f} s"
        + (
            f"; its local engine's turn {r['seconds']:.2f} s a step, then the trainer waited {r['trainer_wait_s']:.2f} s and "
            f"nodes {r['remote_wait_s']:.2f} s" if r["local_engine"] else ""
        )
        + (f"; {r['left']} nodes left with notice, {r['killed']} were killed" if r["spot_up_s"] else "")
    )
