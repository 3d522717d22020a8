"""A run on real processes whose nodes, engines and learner are killed with SIGKILL on a seeded schedule, and an account of
what it cost.

Every process writes down the tokens it makes, sends or accepts (`netem.bench.chaos.tapped`). When the learner is dead, its
journal is copied before anybody touches it: what it had accepted and not journaled is what the next one has made again.
The weights are random and, unless asked otherwise, frozen, so that completions can be compared with those of a run that nothing
disturbs.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from learner.config import build_config, dump_toml
from learner.journal.journal import Journal
from learner.status.source import fetch_status
from learner.tasks.guess_digits import GuessDigitsTask
from netem.bench.chaos.account import Books, ChaosAccount, EngineKill
from netem.bench.chaos.replay import GameReplay
from netem.bench.chaos.tapped import HOLD
from netem.processes.children import Children, LoggedProcess, run_module, wait_for
from netem.processes.engines import engines_of
from p2p.errors import ShoalError, UsageError

GROUPS, SAMPLES = 20, 4
"""A step: so much that it takes a second or two, where nothing else runs either, and kills find something under way."""

SEED, TASK_SEED, MAX_NEW_TOKENS = 5, 0, 48
"""Seeds of the run and of its task, always the same since kills have one of their own; most tokens of a completion, so that steps
are short."""

TAPPED = "netem.bench.chaos.tapped"
"""The module that is `shoal`, and writes down what it does."""

WAIT_S = 300.0
"""Seconds of the longest wait: so long that only a hang reaches it."""

MODEL_BUILDER, PLAYER_BUILDER = "netem.demo.tiny_model", "netem.demo.recipes"
"""The modules that make the models, in a process of their own: they import torch, which this one is better without."""

GAME = "guess_digits"
"""The task of several turns. Its player writes digits and no more, so most episodes have several turns."""

TASKS: dict[str, dict[str, Any]] = {"reverse": {"digits": 6}, GAME: {"digits": 3, "symbols": 3, "guesses": 5}}
"""name -> options. A game of `guesses` turns fits into MAX_NEW_TOKENS by far: a guess, the end of the turn, a hint."""


@dataclass(frozen=True)
class ChaosSettings:
    """`frozen`: the weights never change."""

    seed: int = 0
    steps: int = 24
    nodes: int = 3
    node_kills: int = 6
    learner_kills: int = 2
    frozen: bool = True
    temperature: float = 1.0
    engine_kills: int = 0
    engine: tuple[str, ...] = ()
    """arguments of `shoal node` that choose one"""
    task: str = "reverse"
    """one of TASKS"""
    beside: bool = False
    """write checkpoints beside training: kills then take published versions back, and their prompts are drawn again, with other
    seeds"""

    def __post_init__(self) -> None:
        fewest = min(self.node_kills, self.learner_kills, self.engine_kills)
        if min(self.steps, self.nodes) < 1 or fewest < 0 or not self.temperature > 0:
            raise UsageError("steps, nodes, temperature: above 0; kills: not below 0")
        if self.task not in TASKS:
            raise UsageError(f"no task {self.task!r} here: {', '.join(TASKS)}")


def random_model(folder: Path) -> Path:
    """A model of random weights, scaled up so that each token depends sharply on those before it. Its sequences are long."""
    run_module(MODEL_BUILDER, str(folder), "3")
    return folder


def player(folder: Path) -> Path:
    """The model of `shoal demo --recipe game` before training: it plays by the form, so that its episodes have turns."""
    run_module(PLAYER_BUILDER, str(folder), "game", str(SEED))
    return folder


def model_for(task: str, folder: Path) -> Path:
    """A model whose completions have something to interrupt."""
    return player(folder) if task == GAME else random_model(folder)


class Chaos:
    """One run, from its first learner to its books. ShoalError when something does not happen in time, or must not happen."""

    def __init__(self, root: Path, model: Path, settings: ChaosSettings, say: Callable[[str], None] = lambda _: None) -> None:
        self.root, self.settings, self.rng, self.say = root, settings, random.Random(settings.seed), say
        root.mkdir(parents=True, exist_ok=True)
        self.shoal, self.run_dir, self.config = Children(root), root / "run", root / "learner.toml"
        replay = GameReplay(model, GuessDigitsTask(TASK_SEED, **TASKS[GAME])) if settings.task == GAME else None
        self.books = Books(root, self.run_dir, settings.frozen, replay)
        self.account = self.books.account
        self.nodes: dict[str, LoggedProcess] = {}
        self.lives = 0
        self.last_steps = max(1, settings.steps - 2)
        """the first of those that are trained once all kills are done, however long a kill takes here"""
        values: dict[str, Any] = {
            "run_dir": str(self.run_dir), "model": str(model), "seed": SEED,
            "task": {"name": settings.task, "seed": TASK_SEED, "options": TASKS[settings.task]},
            "rollout": {"max_staleness": 2, "groups_per_step": GROUPS, "samples": SAMPLES, "max_new_tokens": MAX_NEW_TOKENS,
                        "micro_batch_groups": 2, "temperature": settings.temperature},
            "swarm": {"segment_bytes": 131072, "anchor_every": 20, "listen": ["/ip4/127.0.0.1/tcp/0"]},
            "trainer": {"steps": settings.steps, "lr": 1e-30 if settings.frozen else 3e-4, "served_dtype": "float32",
                        "threads": 1, "eval_size": 0, "checkpoint_beside": settings.beside},
            # The nodes are its own: one that has proven nothing, since its engine was killed early, would pass nothing on.
            "standing": {"trusted": ["*"]},
        }  # fmt: skip
        self.config.write_text(dump_toml(build_config(values, "chaos").model_dump()))

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_learner(self) -> None:
        self.lives += 1
        resume = ["--resume"] if self.lives > 1 else []
        self.learner = self.shoal.start(
            f"learner-{self.lives}", str(self.root / f"learner-{self.lives}.taps"), "learner", str(self.config), "--json",
            *resume, module=TAPPED,
        )  # fmt: skip

    def start_node(self, name: str) -> None:
        self.nodes[name] = self.shoal.start(
            name, str(self.root / f"{name}.taps"), "node", "--join", str(self.run_dir / "ticket.txt"), "--name", name, "--dir",
            str(self.root / name), "--capacity", "8", "--listen", "/ip4/127.0.0.1/tcp/0", "--json", *self.settings.engine,
            module=TAPPED,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """The learner's status page; empty while there is none."""
        try:
            status = fetch_status(self.run_dir)
        except UsageError:
            return {}
        return status if not status["finished"] and status.get("pid") == self.learner.pid else {}

    def _past(self, step: int) -> bool:
        return bool(self.status().get("step", -1) >= step)

    def serving(self) -> list[str]:
        """Nodes that have made tokens for this learner, in this life of theirs. Where the run is held there may be nothing
        left to make: then those that are ready."""
        status = self.status()
        ready = {
            n["name"]: n["tokens"] for n in status.get("nodes", ())
            if n["alive"] and n["ready"] and self.nodes[n["name"]].poll() is None
        }  # fmt: skip
        at_work = [name for name, tokens in ready.items() if tokens > 0]
        return at_work or (list(ready) if status.get("step", -1) >= self.last_steps - 1 else [])

    def _waits(self, what: str, condition: Callable[[], Any]) -> Any:
        return wait_for(what, condition, WAIT_S, [self.learner])

    def _said(self) -> str:
        return self.shoal.said(f"learner-{self.lives}")

    # --- the run -----------------------------------------------------------------------------------------------------

    def schedule(self) -> list[tuple[int, str]]:
        """(step, what): kills over the run, learner kills of both kinds in turn."""
        s, last = self.settings, max(1, self.settings.steps - 3)
        kills = [(self.rng.randint(1, last), "node") for _ in range(s.node_kills)]
        kills += [(self.rng.randint(min(2, last), last), ("head", "trainer")[i % 2]) for i in range(s.learner_kills)]
        kills += [(self.rng.randint(1, last), "engine") for _ in range(s.engine_kills)]
        return sorted(kills)

    def go(self) -> ChaosAccount:
        """The whole run. Blocks; all processes are gone at the end."""
        started = time.monotonic()
        try:
            hold = self.root / HOLD
            hold.write_text(str(self.last_steps))
            self.start_learner()
            self._waits("a ticket", (self.run_dir / "ticket.txt").exists)
            for i in range(self.settings.nodes):
                self.start_node(f"node-{i + 1}")
            for step, what in self.schedule():
                self._waits(f"step {step}", partial(self._past, step))
                victims = self._waits("a node that works", self.serving)
                time.sleep(self.rng.random() * 0.5)  # in the midst of whatever
                if what == "node":
                    self.kill_node(self.rng.choice(victims))
                elif what == "engine":
                    self.kill_engine(self.rng.choice(victims))
                else:
                    self.kill_learner(what)
            self._waits("the engines to be back", self.books.engines_back)
            hold.unlink()
            if self.learner.wait(timeout=600):
                raise ShoalError(f"the learner ended with {self.learner.returncode}:\n{self._said()}")
            last = self.shoal.result(f"learner-{self.lives}")
            for name in (n["name"] for n in last["nodes"] if n["alive"]):  # one that was just starting found nobody
                if self.nodes[name].wait(timeout=120):
                    raise ShoalError(f"{name} ended with {self.nodes[name].returncode}:\n{self.shoal.said(name)}")
            self.books.life_ended(self.lives)
            self.books.time_to_journal(self.nodes)
            self._balance()
        finally:
            self.shoal.end(0)
        self.account.seconds = time.monotonic() - started
        return self.account

    def kill_node(self, name: str) -> None:
        """With its engine, which must not outlive it; started again at once."""
        node = self.nodes[name]
        children = psutil.Process(node.pid).children(recursive=True)
        node.send_signal(signal.SIGKILL)
        node.wait()
        self._gone(children, f"an engine outlived {name}")
        self.account.node_kills += 1
        self.say(f"killed {name} ({self.account.node_kills} of {self.settings.node_kills})")
        self.start_node(name)

    def kill_engine(self, name: str) -> None:
        """Its node must not even notice that it was connected."""
        [served] = [n["version"] for n in self.status()["nodes"] if n["name"] == name]
        [engine] = engines_of([self.nodes[name].pid])
        engine.send_signal(signal.SIGKILL)
        self.account.engine_kills.append(EngineKill(name, time.monotonic(), served))
        self.say(f"killed the engine of {name} ({len(self.account.engine_kills)} of {self.settings.engine_kills})")

    def kill_learner(self, what: str) -> None:
        """Its "head", or its "trainer", with which it ends by itself; it is resumed once stock was taken."""
        children = psutil.Process(self.learner.pid).children(recursive=True)
        if what == "head":
            self.learner.send_signal(signal.SIGKILL)
            self.learner.wait()
        else:
            [trainer] = [p for p in children if "learner.trainer.trainer" in " ".join(p.cmdline())]
            trainer.send_signal(signal.SIGKILL)
            if self.learner.wait(timeout=120) != 1 or "--resume" not in self._said() or "Traceback" in self._said():
                raise ShoalError(f"a learner without its trainer ended with {self.learner.returncode}:\n{self._said()}")
        self._gone(children, "the trainer outlived its head")
        self.account.learner_kills.append(what)
        self.say(f"killed the learner ({what}; {len(self.account.learner_kills)} of {self.settings.learner_kills})")
        self.books.life_ended(self.lives)
        self.books.take_stock(self.lives, self.nodes)
        self.start_learner()
        self._waits("the resumed learner", lambda: self.status().get("epoch", 0) == self.lives)
        resumed, held = self.status()["resumed"], sum(self.books.left.values())
        self.account.resumed_groups += resumed["groups"]
        self.account.resumed_tokens += resumed["tokens"]
        if resumed["tokens"] != held:
            raise ShoalError(f"the next learner took up {resumed['tokens']} tokens of {held} that the journal held")

    def _gone(self, processes: list[psutil.Process], otherwise: str) -> None:
        psutil.wait_procs(processes, timeout=60)
        if any(p.is_running() for p in processes):
            raise ShoalError(otherwise)

    def _balance(self) -> None:
        run = json.loads((self.run_dir / "run.json").read_text())["run"]
        with Journal.open(self.run_dir / "journal.sqlite", run) as journal:
            counts = journal.counts()
            consumed = [row[0] for row in journal._db.execute("SELECT group_id FROM consumed")]
            steps = [row[0] for row in journal._db.execute("SELECT step FROM commits ORDER BY step")]
            orphaned = {row[0] for row in journal._db.execute("SELECT group_id FROM groups WHERE reason = 'orphaned'")}
        if not len(consumed) == len(set(consumed)) == GROUPS * self.settings.steps:
            raise ShoalError(f"{len(consumed)} groups consumed, {len(set(consumed))} of them different")
        if steps != list(range(1, self.settings.steps + 1)):
            raise ShoalError(f"the steps that were committed: {steps}")
        if not set(self.books.given_up) <= orphaned:
            raise ShoalError(f"groups made twice that no kill took back: {sorted(set(self.books.given_up) - orphaned)}")
        self.account.lost = counts.groups.lost + counts.trajectories.lost
        self.account.aborted = dict(Counter(counts.groups.aborted))
        self.account.consumed = len(consumed)
