"""`shoal demo`: build a model, start a learner and nodes as real processes, watch, disturb, report.

Everything it shows comes from the learner's status page and metrics.jsonl. Must not know torch, and starts the same
commands a user would.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from learner.config import build_config, dump_toml
from learner.status.facts import Fact
from learner.status.live import LiveView
from learner.status.outcome import say_on_stderr
from learner.status.report import PAGE, write_report
from learner.status.run_state import RunState
from learner.status.source import fetch_status
from learner.status.steps import read_metrics, surviving
from learner.status.words import by_name, dollars
from netem.demo.chat_model import find_weights, is_made
from netem.demo.recipes import RECIPES, Recipe
from netem.demo.spot import NODES as SPOT_NODES
from netem.demo.spot import STEPS as SPOT_STEPS
from netem.demo.spot import Spot, busy_share, describe_spot
from netem.demo.waiting import Waiting
from netem.processes.children import Children, LoggedProcess, start_module
from netem.processes.forked import fork_module, warm_up
from p2p.errors import ShoalError, UsageError
from p2p.processes import last_line
from p2p.quantities import human_bytes, human_seconds

START_S = 180.0
"""Until the learner accepts nodes: imports, and a resumed run's journal. It took 68 s on a machine with eight times the work it
has cores for."""

BUILDER = "netem.demo.recipes"
"""The module that makes the model, in a process of its own: it imports torch, which this one is better without."""

IMPORTING = "importing torch"
"""What the builder does until it says something."""

NODES = 3
"""Unless asked otherwise: enough that they exchange chunks, and few enough for two cores."""

PSS_EVERY_S = 4.0
"""Seconds between two looks at the memory of all processes: one look takes tens of milliseconds."""

PRICES = (0.34, 0.29, 0.44)
"""What the nodes say they cost an hour, in dollars: such is asked for one rented consumer GPU."""

END_S = 15.0
"""From the learner's end to that of all nodes."""

OF_SUMMARY = (
    "versions_published", "max_staleness_seen", "max_staleness", "trajectories", "delta_bytes_mean", "anchor_bytes",
    "delta_density_mean", "learner_egress_ratio", "epoch",
)  # fmt: skip
"""What the demo's result takes over from the learner's summary as it is."""

CHAOS_AT = 0.4
"""Share of the steps done when --chaos kills a node."""


def run_demo(args: argparse.Namespace) -> dict[str, Any]:
    """The whole demo; its JSON object. UsageError for bad arguments, ShoalError when it cannot go on."""
    recipe = RECIPES[args.recipe]
    if args.spot and args.chaos:
        raise UsageError("--spot kills nodes already: leave out --chaos")
    steps = args.steps or (SPOT_STEPS if args.spot else recipe.steps)
    args.nodes = args.nodes or (SPOT_NODES if args.spot else NODES)
    if steps < 1 or args.nodes < 1:
        raise UsageError("--steps and --nodes must be at least 1")
    run_dir = Path(args.run_dir or Path("runs") / ("demo" if recipe.name == "reverse" else f"demo-{recipe.name}"))
    began = time.monotonic()
    if recipe.kept is not None and not args.resume and not is_made(recipe.kept):
        find_weights()  # before an earlier demo is replaced
    _prepare(run_dir, resume=args.resume)
    if recipe.about and not args.json:
        print(recipe.about)
    with Children(run_dir / "logs") as children:
        demo = Demo(args, recipe, steps, run_dir=run_dir, children=children, began=began)
        result = demo.run()
    if not args.json:
        _print_result(result)
    return result


def _prepare(run_dir: Path, *, resume: bool) -> None:
    if resume:
        if not (run_dir / "demo.json").exists():
            raise UsageError(f"nothing to resume: {run_dir} holds no demo")
        return
    if run_dir.exists() and not run_dir.is_dir():
        raise UsageError(f"--run-dir: {run_dir} is not a directory")
    if run_dir.exists() and any(run_dir.iterdir()):
        if not (run_dir / "demo.json").exists():
            raise UsageError(f"{run_dir} is not empty and not an earlier demo: choose another --run-dir")
        shutil.rmtree(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {run_dir}: {error.strerror}") from None
    (run_dir / "demo.json").write_text("{}")


class Demo:
    """One run of the demo."""

    def __init__(
        self, args: argparse.Namespace, recipe: Recipe, steps: int, run_dir: Path, children: Children, began: float
    ) -> None:
        self.args, self.recipe, self.steps, self.run_dir, self.children = args, recipe, steps, run_dir, children
        self.began = began
        self.events: list[str] = []
        """what the demo did to its nodes"""
        self._told: list[dict[str, Any]] = []
        """the same, as events of the run"""
        self.nodes: dict[str, LoggedProcess] = {}
        self.spot: Spot | None = None
        self.disturbed = False
        self.pss_peak = 0
        self._pss_at = 0.0

    def run(self) -> dict[str, Any]:
        """From the model to the end of the last process; the result's JSON object. ShoalError when a process fails."""
        model, config = self.recipe.kept or self.run_dir / "model", self.run_dir / "learner.toml"
        if not self.args.resume:
            if self.recipe.kept is None or not is_made(model):
                self._build(model)
            args = self.args
            settings = self.recipe.config(self.run_dir / "run", model, self.steps, args.seed, args.spot, lora=args.lora)
            config.write_text(dump_toml(build_config(settings, "demo").model_dump()))
        flags = ["--resume"] if self.args.resume else []
        learner = self.children.start("learner", "learner", str(config), "--json", *flags)
        self._wait_ready(learner)
        self.args.interrupted_hint = f": go on with {self.go_on}"  # before, there is no run
        if self.args.spot:
            warm_up()
            self.spot = Spot(self.args.nodes, self.args.seed, self._start_node, self._tell)
        else:
            for i in range(self.args.nodes):
                self._start_node(f"node-{i + 1}")
        with LiveView(say_on_stderr, page=not self.args.json) as view:
            while learner.poll() is None:
                self._watch(view)
                time.sleep(0.5)
            if learner.returncode == 0:
                summary = json.loads((self.run_dir / "run" / "summary.json").read_text())
                view.update(self._state({**summary, "finished": True}))
        if learner.returncode != 0:
            raise ShoalError(
                f"the learner ended with status {learner.returncode}: {learner.last_line()} "
                f"(go on with: {self.go_on})"
            )
        self._end_nodes(there={node["name"] for node in summary["nodes"] if node["alive"]})
        return self._result(summary)

    @property
    def go_on(self) -> str:
        """The command that goes on with this demo once it was stopped."""
        args, usual = self.args, SPOT_NODES if self.args.spot else NODES
        words = ["shoal demo --resume --run-dir", shlex.quote(str(self.run_dir))]
        words += ["--recipe", self.recipe.name] if self.recipe.name != "reverse" else []
        for flag, value in (("--steps", args.steps), ("--nodes", args.nodes * (args.nodes != usual)), ("--seed", args.seed)):
            words += [flag, str(value)] if value else []
        return " ".join([*words, *(["--spot"] if args.spot else [])])

    def _build(self, model: Path) -> None:
        builder = self.children.start("build", str(model), self.recipe.name, str(self.args.seed), module=BUILDER)
        with Waiting(f"building the demo's model: {IMPORTING}", shown=not self.args.json) as waiting:
            while builder.poll() is None:
                time.sleep(0.2)
                waiting.say(f"building the demo's model: {last_line(builder.out, nothing=IMPORTING)}")
        if builder.returncode != 0:
            raise ShoalError(f"the model could not be built: {builder.last_line()}")

    def _wait_ready(self, learner: LoggedProcess) -> None:
        deadline = time.monotonic() + START_S
        with Waiting("starting the learner", shown=not self.args.json):
            while self._status() is None:
                if learner.poll() is not None:
                    raise ShoalError(f"the learner did not start: {learner.last_line()}")
                if time.monotonic() > deadline:
                    raise ShoalError(f"the learner was not ready within {START_S:.0f} s: {learner.last_line()}")
                time.sleep(0.1)

    def _start_node(self, name: str) -> LoggedProcess:
        price = PRICES[(int(name.removeprefix("node-")) - 1) % len(PRICES)]
        capacity = self.recipe.spot_capacity if self.args.spot else self.recipe.capacity
        command = [
            "node", "--join", str(self.run_dir / "run" / "ticket.txt"), "--dir", str(self.run_dir / name),
            "--listen", "/ip4/127.0.0.1/tcp/0", "--name", name, "--capacity", str(capacity), "--json",
            "--usd-per-hour", str(price),
        ]  # fmt: skip
        self.nodes[name] = self.children.start(name, *command, starter=fork_module if self.args.spot else start_module)
        return self.nodes[name]

    def _status(self) -> dict[str, Any] | None:
        """What the learner's status page says; None while it has none."""
        try:
            status = fetch_status(self.run_dir / "run")
        except UsageError:
            return None
        return None if status["finished"] else status

    def _watch(self, view: LiveView) -> None:
        status = self._status()
        if status is not None:
            view.update(self._state(status))
            if self.args.chaos and not self.disturbed and status["step"] >= CHAOS_AT * self.steps:
                self._chaos(status)
            if self.spot is not None and status["step"] >= self.steps:
                self.spot.stop()  # who is there now ends with the run, as in any other
        if self.spot is not None:
            self.spot.go_on()
        if time.monotonic() - self._pss_at > PSS_EVERY_S:
            self._pss_at = time.monotonic()
            self.pss_peak = max(self.pss_peak, self.children.pss_bytes())
        for name, child in self.nodes.items():
            if child.failed():
                raise ShoalError(f"{name} ended with status {child.returncode}: {child.last_line()}")

    def _state(self, status: dict[str, Any]) -> RunState:
        """The run's, with what the demo did to it."""
        events = sorted([*status.get("events", ()), *self._told], key=lambda e: float(e["time"]))
        return RunState.of({**status, "events": events})

    def _tell(self, text: str) -> None:
        """Something that the demo did to its nodes."""
        self.events.append(text)
        self._told.append({"time": time.time(), "level": "warning", "text": text})

    def _chaos(self, status: dict[str, Any]) -> None:
        """SIGKILL a node that is generating, and bring a fresh one."""
        self.disturbed = True
        victim = f"node-{min(2, self.args.nodes)}"
        self.nodes[victim].send(signal.SIGKILL)
        newcomer = f"node-{self.args.nodes + 1}"
        self._start_node(newcomer)
        self._tell(f"step {status['step']}: killed {victim} with SIGKILL, started {newcomer}")

    def _end_nodes(self, there: set[str]) -> None:
        """The nodes leave by themselves once the head said goodbye; those that came too late to be `there` never will."""
        if self.spot is not None:
            self.spot.stop()
            for name in self.nodes.keys() - there:
                self.nodes[name].send(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and any(c.poll() is None for c in self.nodes.values()):
            time.sleep(0.1)

    def _result(self, summary: dict[str, Any]) -> dict[str, Any]:
        lines = read_metrics(self.run_dir / "run" / "metrics.jsonl")
        # A resumed run repeats steps that were not committed: what counts is what the surviving history trained.
        trained = [row for row in surviving(lines) if "exact/mean" in row]
        exact, reward = [row["exact/mean"] for row in trained], [row["reward/mean"] for row in trained]
        tenth = max(1, len(exact) // 10)
        evals = [line for line in lines if "eval/exact/mean" in line] or [{}]
        keep = (
            "version", "digest_ok", "tokens", "bytes_from_learner", "bytes_from_peers", "alive", "name", "usd", "usd_per_hour",
            "activity", "why_active",
        )  # fmt: skip
        pool = summary["pool"]
        result = {
            "ok": True,
            "reward_first": mean(exact[:tenth]), "reward_last": mean(exact[-tenth:]),
            "eval_first": evals[0].get("eval/exact/mean"), "eval_last": evals[-1].get("eval/exact/mean"),
            "steps": summary["step"], "seconds": time.monotonic() - self.began,
            "nodes": [
                {k: node[k] for k in keep if k in node} for node in sorted(summary["nodes"], key=lambda n: by_name(n["name"]))
            ],
            "usd_spent": pool["spent_usd"], "usd_per_step": pool["spent_usd"] / max(1, summary["step"]),
            "usd_per_mtok": 1e6 * pool["spent_usd"] / max(1, sum(row["perf/tokens"] for row in trained)),
            "activation": pool["changes"],
            **{key: summary[key] for key in OF_SUMMARY}, "pss_peak_bytes": self.pss_peak, "events": self.events,
            "recipe": self.recipe.name, "run_dir": str(self.run_dir),
        }  # fmt: skip
        if self.recipe.own_reward:
            result["own_reward"] = {
                "first": mean(reward[:tenth]), "last": mean(reward[-tenth:]),
                "eval_first": evals[0].get("eval/reward/mean"), "eval_last": evals[-1].get("eval/reward/mean"),
            }  # fmt: skip
        if self.spot is not None:
            result["spot"] = asdict(self.spot.counts) | busy_share(lines)._asdict()
        wrong = _faults(result, summary["version"], self.nodes)
        result["ok"], result["faults"] = not wrong, wrong
        page = write_report(
            self.run_dir / "run", RunState.of({**summary, "finished": True}), page=self.run_dir / PAGE, extra=_facts(result),
            faults=wrong, happened=self.events,
        )  # fmt: skip
        return result | {"report": str(page)}


def _facts(result: dict[str, Any]) -> list[Fact]:
    """What the demo alone knows of its run, for the report."""
    facts = [
        Fact("recipe", result["recipe"]), Fact("the whole demo", human_seconds(result["seconds"])),
        Fact("peak memory", f"{human_bytes(result['pss_peak_bytes'])} of all processes (PSS)"),
    ]  # fmt: skip
    return [*facts, Fact("nodes came and went", describe_spot(result["spot"]))] if "spot" in result else facts


def _faults(result: dict[str, Any], last: str, nodes: dict[str, LoggedProcess]) -> list[str]:
    """What a demo must never show, as sentences; [] when all is well."""
    faults = []
    for node in result["nodes"]:
        if node["alive"] and not (node["digest_ok"] and node["version"] == last):
            faults.append(
                f"{node['name']} ended at version {node['version']} (digest ok: {node['digest_ok']}), not {last}"
            )
    trajectories = result["trajectories"]
    if trajectories["lost"]:
        faults.append(f"{trajectories['lost']} trajectories lost")
    if result["max_staleness_seen"] > result["max_staleness"]:
        faults.append(f"staleness {result['max_staleness_seen']} over the bound of {result['max_staleness']}")
    for name, child in nodes.items():
        if child.poll() is None:
            faults.append(f"{name} did not leave within {END_S:.0f} s")
        elif child.failed():
            faults.append(f"{name} ended with status {child.returncode}")
    return faults


def _print_result(result: dict[str, Any]) -> None:
    mib = 1 << 20
    t = result["trajectories"]
    print()
    if "own_reward" in result:
        own = result["own_reward"]
        print(f"sampled reward {own['first']:.2f} -> {own['last']:.2f}", end="")
        print(f", held-out greedy {own['eval_first']:.2f} -> {own['eval_last']:.2f}" if own["eval_first"] is not None else "")
    print(f"sampled exact match {result['reward_first']:.2f} -> {result['reward_last']:.2f}", end="")
    if result["eval_first"] is not None:
        print(f", held-out greedy {result['eval_first']:.2f} -> {result['eval_last']:.2f}", end="")
    print(f" in {result['steps']} steps, {result['seconds']:.0f} s")
    print(
        f"versions {result['versions_published']}, delta {result['delta_bytes_mean'] / mib:.3f} MiB on average "
        f"({result['delta_density_mean']:.1%} of values), anchor {result['anchor_bytes'] / mib:.3f} MiB, "
        f"learner sent {result['learner_egress_ratio']:.2f} x each version"
    )
    print(
        f"staleness {result['max_staleness_seen']} (bound {result['max_staleness']}); trajectories: {t['reserved']} "
        f"reserved, {t['consumed']} consumed, {sum(t['aborted'].values())} aborted, {t['outstanding']} outstanding, "
        f"{t['lost']} lost"
    )
    if "spot" in result:
        print(describe_spot(result["spot"]))
    for node in result["nodes"]:
        state = "ok" if node["alive"] and node["digest_ok"] else "gone" if not node["alive"] else "WRONG DIGEST"
        print(
            f"  {node['name']}: version {node['version']} {state}, {node['tokens']} tokens, "
            f"{node['bytes_from_learner'] / mib:.1f} MiB from the learner, {node['bytes_from_peers'] / mib:.1f} from peers"
        )
    if result["usd_spent"]:
        print(
            f"spent {dollars(result['usd_spent'])}: {dollars(result['usd_per_step'])} a step, "
            f"{dollars(result['usd_per_mtok'])} a million tokens trained on; who generated, and why:"
        )
        for node in result["nodes"]:
            price = f"${node.get('usd_per_hour', 0):.2f}/h, {dollars(node['usd'])}"
            print(f"  {node['name']}, {price}: {node.get('why_active') or '-'}")
    for fault in result["faults"]:
        print(f"FAULT: {fault}")
    print(f"report: {result['report']}")
    print(f"next: shoal export {result['run_dir']}/run OUT     # the checkpoint as a Hugging Face folder")
