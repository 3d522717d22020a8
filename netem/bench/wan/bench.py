"""`shoal bench wan`: from the end of an optimizer step to the last node's first token under the new version, on emulated links.

A learner and nodes, real processes in network namespaces; the trainer is this process, by the client that any trainer uses.
Nodes have the base model on their disks and generate all the time. What is timed is seen in the nodes' own logs,
on one clock. All hosts share this machine's cores: engines, each of which has a device of its own in the field, get what the
others leave (`behind_all_others`). Thin shell; needs root.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from learner.client.client import LearnerClient
from learner.config import build_config, dump_toml
from netem.bench.wan.priority import behind_all_others, give_way
from netem.bench.wan.stages import Queueing, stage_seconds, table
from netem.bench.wan.updates import Updates, smollm2_135m
from netem.emulation.backends import AUTO
from netem.emulation.underlay import Underlay, underlay
from netem.networks.bound import profile_bound
from netem.networks.profile import LEARNER, build_profile
from netem.processes.children import Children, start_module
from p2p.errors import ShoalError, UsageError
from p2p.stages import Reached, read_stages
from p2p.version import Version

WAIT_S = 900.0
"""Seconds of the longest wait, for nodes to load their engines: so long that only a hang reaches it."""

LOOK_S = 0.05
"""Seconds between two looks at the nodes' logs: when a stage was reached is what they say themselves, and looking takes of the
cores that are measured."""

FIRST = "first token"
"""The stage at which the clock stops."""

PORT = 4001
"""On which every host listens."""

AHEAD = 64
"""Groups of one short completion that nodes may be ahead of the trainer: they never have nothing to generate."""

SCRIPTED_STEP_S = 0.1
"""Seconds that a scripted engine sleeps for a token: faster ones would reach the end of what may be ahead (`AHEAD`)."""

ASKED_S, ASKED_PART = 3.0, (1.5, 1.0)
"""What issue 20 asks of a rank-16 adapter of SmolLM2-135M: seconds, and this many T* plus this many seconds."""

Say = Callable[[str], None]


def bench_wan(
    model: Path | None, ranks: Sequence[int], versions: int, nodes: int, engine_python: str, *, dtype: str = "auto",
    told: bool = False, computing: int | None = None, backend: str = AUTO, say: Say,
) -> dict[str, Any]:  # fmt: skip
    """What `shoal bench wan --json` prints: one part for each of `ranks` (0: full training). With an `engine_python` one of the
    nodes runs vLLM there. `dtype`: what engines compute in. `told`: the learner is told its uplink's rate. `computing`: how many
    nodes' engines compute (default all); the others' are scripted and take no time of the cores. UsageError where numbers make
    no sense; ShoalError when somebody does not get there."""
    computing = nodes if computing is None else computing
    if not int(bool(engine_python)) <= computing <= nodes:
        raise UsageError(f"{computing} computing of {nodes} nodes: want at most all, and one or more with vLLM")
    if nodes < 1 or versions < 1 or any(rank < 0 for rank in ranks):
        raise UsageError(f"{nodes} nodes, {versions} versions, ranks {list(ranks)}: want 1 or more of each, ranks from 0 on")
    parts = []
    for rank in ranks:
        with tempfile.TemporaryDirectory(prefix="shoal-wan-") as name:
            folder = Path(name)
            if model is None:
                smollm2_135m(folder / "model")
            parts.append(_measure(folder, model or folder / "model", rank, versions, nodes=nodes, engine_python=engine_python,
                                  dtype=dtype, told=told, computing=computing, backend=backend, say=say))  # fmt: skip
    vllm, cores = int(bool(engine_python)), len(os.sched_getaffinity(0))
    settings = {"nodes": nodes, "computing": computing, "vllm_nodes": vllm, "cores": cores, "dtype": dtype, "told": told}
    return {"ok": True, **settings, "parts": parts}


def _measure(
    folder: Path, model: Path, rank: int, versions: int, *, nodes: int, engine_python: str, dtype: str, told: bool,
    computing: int, backend: str, say: Say,
) -> dict[str, Any]:  # fmt: skip
    links = {"learner": {"preset": "home-fiber"}, "nodes": [{"preset": "home-cable", "count": nodes}]}
    profile = build_profile(links, "bench wan")
    lr = 2e-4 if rank else 1e-6
    updates = Updates(model, rank, lr)
    with underlay(profile, backend) as network, behind_all_others(), Children(folder / "logs") as children:
        run = _Run(folder, network, children, say)
        run.start_learner(model, rank, profile.learner.access.up / 1e6 if told else 0.0)
        client = LearnerClient.connect(run.run_dir)
        try:
            client.resume()
            client.publish(0, updates.state())
            names = [host.name for host in profile.hosts if host.name != LEARNER]
            vocab = json.loads((model / "config.json").read_text())["vocab_size"]
            for place, name in enumerate(names):
                engine = _engine(place, engine_python, computing, vocab)
                run.start_node(name, model, engine, dtype)
            run.wait_for("version 1.0", names, Version(1, 0), WAIT_S)
            give_way(child.pid for child in children.all if child.name in names)
            times, bytes_, stages, loads, reached, queued = [], [], [], [], [], []
            for step in range(1, versions + 1):
                for _ in client.batches(step - 1):  # as a trainer takes what it trains on
                    pass
                updates.step()
                state = updates.state()
                time.sleep(1.0)
                network.weather()
                queueing = run.queueing()
                began = time.monotonic()  # the optimizer step has ended
                client.publish(step, state)
                published = Reached(Version(1, step), "published", time.monotonic())
                run.wait_for(f"version 1.{step}", names, Version(1, step), WAIT_S)
                queued.append(queueing.since())
                client.log(step, {})
                reached.append(run.stages(names, Version(1, step), began, published))
                times.append({name: stages_of[FIRST] for name, stages_of in reached[-1].items()})
                loads.append(os.getloadavg()[0])
                stages.append(dict(client.stages))
                bytes_.append(run.delta_bytes(step))
                last = max(times[-1].values())
                say(f"rank {rank}, version {step}: {bytes_[-1]:,} bytes, the last node's first token after {last:.2f} s "
                    f"(load {loads[-1]:.0f}, switch late by {network.weather().late_s * 1e3:.0f} ms)")  # fmt: skip
        finally:
            client.close()
    lasts = [max(t.values()) for t in times]
    t_star = profile_bound(profile, int(statistics.median(bytes_)))
    return {
        "rank": rank, "lr": lr, "bytes": bytes_, "t_star_s": t_star, "last_s": lasts, "median_s": statistics.median(lasts),
        "worst_s": max(lasts), "first_s": [min(t.values()) for t in times], "of_nodes": times, "stages": stages, "load": loads,
        "reached_s": reached, "ran_and_queued_s": queued,
        "asked_s": min(ASKED_S, ASKED_PART[0] * t_star + ASKED_PART[1]), "backend": network.backend,
    }  # fmt: skip


def _engine(place: int, vllm_python: str, computing: int, vocab: int) -> tuple[str, ...]:
    """Options of the node at this place."""
    if place == 0 and vllm_python:
        return ("--engine", "vllm", "--engine-python", vllm_python, "--engine-set", "kv_bytes=400000000")
    if place < computing:
        return ()
    return ("--engine", "fake", "--engine-set", f"vocab_size={vocab}", "--engine-set", f"step_s={SCRIPTED_STEP_S}")


class _Run:
    def __init__(self, folder: Path, network: Underlay, children: Children, say: Say) -> None:
        self.folder, self.network, self.children, self.say = folder, network, children, say
        self.run_dir = folder / "run"

    def start_learner(self, model: Path, rank: int, uplink_mbit: float) -> None:
        config: dict[str, Any] = {
            "run_dir": str(self.run_dir), "model": str(model), "external_trainer": True, "task": {"name": "reverse"},
            "swarm": {"listen": [f"/ip4/{self.network.addresses[LEARNER]}/tcp/{PORT}"], "uplink_mbit": uplink_mbit},
            "rollout": {"groups_per_step": 1, "samples": 1, "max_new_tokens": 64, "max_staleness": AHEAD},
            "trainer": {"eval_size": 0},  # a node that evaluates a version holds the next one back for up to `requests.hold_s`
            "audit": {"share": 0},  # the auditor would compute in front of the engines, which come last on these cores
        }  # fmt: skip
        if rank:
            config["trainer"]["lora"] = {"rank": rank}
        (self.folder / "learner.toml").write_text(dump_toml(build_config(config, "bench").model_dump()))
        self._start(LEARNER, "learner", str(self.folder / "learner.toml"), "--json", "-v")
        deadline = time.monotonic() + WAIT_S
        while not (self.run_dir / "ticket.txt").exists():
            self._check(deadline, "the learner")
            time.sleep(0.1)

    def start_node(self, name: str, model: Path, engine: Sequence[str], dtype: str) -> None:
        self._start(
            name, "node", "--join", str(self.run_dir / "ticket.txt"), "--dir", str(self.folder / name), "--name", name,
            "--listen", f"/ip4/{self.network.addresses[name]}/tcp/{PORT}", "--base-model", str(model), "--capacity", "1",
            "--json", "-v", "--dtype", dtype, *engine,
        )  # fmt: skip

    def wait_for(self, what: str, names: Sequence[str], version: Version, wait_s: float) -> None:
        """Return when each node's log tells of its first token under `version`."""
        missing = list(names)
        deadline = time.monotonic() + wait_s
        while missing:
            lines = {name: read_stages(self.children.said(name)) for name in missing}
            missing = [n for n in missing if not any(r.version == version and r.stage == FIRST for r in lines[n])]
            self._check(deadline, f"{what} at {', '.join(missing)}")
            time.sleep(LOOK_S)

    def queueing(self) -> Queueing:
        """Count from now on how the processes wait for a core; the trainer is this one."""
        return Queueing({child.name: child.pid for child in self.children.all})

    def stages(self, names: Sequence[str], version: Version, began: float, published: Reached) -> dict[str, dict[str, float]]:
        """Node -> stage -> seconds from `began` until `version` reached it."""
        ours = [published, *read_stages(self.children.said(LEARNER))]
        return {name: stage_seconds([*ours, *read_stages(self.children.said(name))], version, began) for name in names}

    def delta_bytes(self, step: int) -> int:
        """Payload bytes of the version's delta, as the head counts them."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return int(next(line["broadcast/bytes"] for line in reversed(found) if line.get("step") == step))

    def _start(self, name: str, *arguments: str) -> None:
        starter = partial(start_module, prefix=self.network.command(name, []))
        self.children.start(name, *arguments, starter=starter)

    def _check(self, deadline: float, what: str) -> None:
        for child in self.children.all:
            if child.poll() is not None:
                raise ShoalError(f"{child.name} ended before {what}: {child.last_line()}")
        if time.monotonic() > deadline:
            raise ShoalError(f"not within {WAIT_S:.0f} s: {what}")


def describe(result: dict[str, Any]) -> str:
    """A few lines for people."""
    who = f"{result['nodes']} home-cable nodes ({result['vllm_nodes']} of them vLLM)"
    told = "told its uplink's rate" if result["told"] else "not told its uplink's rate"
    if result["computing"] < result["nodes"]:
        who += f", {result['computing']} with an engine that computes"
    lines = [f"{who}, engines compute in {result['dtype']}; home-fiber learner, {told}; {result['cores']} cores for all"]
    for part in result["parts"]:
        what = f"LoRA rank {part['rank']}" if part["rank"] else "full training"
        lines.append(
            f"{what}: {statistics.median(part['bytes']) / 1e6:.2f} MB a version (median), T* {part['t_star_s']:.2f} s; optimizer "
            f"step to the last node's first token: median {part['median_s']:.2f} s, worst {part['worst_s']:.2f} s, over "
            f"{len(part['last_s'])} versions (asked of rank 16: {part['asked_s']:.2f}); load {min(part['load']):.0f} to "
            f"{max(part['load']):.0f}"
        )
        lines += table(part["reached_s"])
        for name in part["ran_and_queued_s"][0]:
            ran, queued = (statistics.median(of[name][i] for of in part["ran_and_queued_s"]) for i in (0, 1))
            lines.append(f"{name}: ran {ran:.2f} s and queued for a core {queued:.2f} s of a version's time (medians)")
    return "\n".join(lines)
