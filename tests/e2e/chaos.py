"""A run on real processes whose nodes and learner are killed with SIGKILL on a seeded schedule, and an account of what it cost.

`python -m tests.e2e.chaos --node-kills 20 --learner-kills 3 --steps 60` prints one JSON object.

Every process writes down the tokens it sends or accepts (`tests.e2e.tapped`). When the learner is dead, its journal is copied
before anybody touches it: what it had accepted and not journaled is what the next one has made again.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from learner.config import build_config, dump_toml
from learner.journal import Journal
from learner.members import ATTEMPTS
from learner.trajectory import Trajectory, unpack_groups
from tests.e2e.conftest import ENV, Shoal, wait_for

GROUPS = 20
"""A step: so many that it takes a second or two, where nothing else runs either; else the run is over before its kills."""

SEED, MAX_NEW_TOKENS = 5, 48

Key = tuple[int, int]
"""(group id, member), or (task index, member)"""


@dataclass
class Account:
    """What the kills cost."""

    node_kills: int = 0
    learner_kills: list[str] = field(default_factory=list)
    resumed_groups: int = 0
    resumed_tokens: int = 0
    regenerated: int = 0
    """tokens that a dead learner had accepted and its journal had not"""
    regenerated_max: int = 0
    """the most of one trajectory at one kill"""
    in_flight: int = 0
    """tokens that nodes had sent and a dead learner had not accepted"""
    accepted: int = 0
    aborted: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    consumed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Settings:
    """`frozen`: the weights never change, so that completions can be compared with those of another run."""

    seed: int = 0
    steps: int = 24
    nodes: int = 3
    node_kills: int = 6
    learner_kills: int = 2
    frozen: bool = True


MAKE_MODEL = """
import sys, torch, learner.recipe
from pathlib import Path
from transformers import AutoModelForCausalLM
folder = learner.recipe.build_random_model(Path(sys.argv[1]), size="0.4m")
model = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    for p in model.parameters():
        if p.ndim > 1:
            p.mul_(3)
model.save_pretrained(folder)
"""


def random_model(folder: Path) -> Path:
    """A model of random weights, scaled up so that each token depends sharply on those before it. Its sequences are long."""
    command, root = [sys.executable, "-c", MAKE_MODEL, str(folder)], Path(__file__).parents[2]
    subprocess.run(command, check=True, env=ENV, capture_output=True, timeout=300, cwd=root)
    return folder


class Chaos:
    """One run, from its first learner to its books."""

    def __init__(self, root: Path, model: Path, settings: Settings) -> None:
        self.root, self.settings, self.rng = root, settings, random.Random(settings.seed)
        root.mkdir(parents=True, exist_ok=True)
        self.shoal, self.run_dir, self.config = Shoal(root), root / "run", root / "learner.toml"
        self.account = Account()
        self.trajectories: dict[Key, Trajectory] = {}
        """by (task index, member), of every group that was finished"""
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.lives = 0
        self._left: dict[Key, int] = {}
        values: dict[str, Any] = {
            "run_dir": str(self.run_dir), "model": str(model), "seed": SEED,
            "task": {"name": "reverse", "options": {"digits": 6}},
            "rollout": {"max_staleness": 2, "groups_per_step": GROUPS, "samples": 4, "max_new_tokens": MAX_NEW_TOKENS,
                        "micro_batch_groups": 2},
            "swarm": {"segment_bytes": 131072, "anchor_every": 20, "listen": ["/ip4/127.0.0.1/tcp/0"]},
            "trainer": {"steps": settings.steps, "lr": 1e-30 if settings.frozen else 3e-4, "served_dtype": "float32",
                        "threads": 1, "eval_size": 0},
        }  # fmt: skip
        self.config.write_text(dump_toml(build_config(values, "chaos").model_dump()))

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_learner(self) -> None:
        self.lives += 1
        resume = ["--resume"] if self.lives > 1 else []
        self.learner = self.shoal.start(
            f"learner-{self.lives}", str(self.root / f"learner-{self.lives}.taps"), "learner", str(self.config), "--json",
            *resume, module=("tests.e2e.tapped",),
        )  # fmt: skip

    def start_node(self, name: str) -> None:
        self.nodes[name] = self.shoal.start(
            name, str(self.root / f"{name}.taps"), "node", "--join", str(self.run_dir / "ticket.txt"), "--name", name, "--dir",
            str(self.root / name), "--capacity", "8", "--listen", "/ip4/127.0.0.1/tcp/0", "--json", module=("tests.e2e.tapped",),
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """The learner's status page; empty while there is none."""
        try:
            port = json.loads((self.run_dir / "status.json").read_text())["port"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=2) as answer:
                value: dict[str, Any] = json.loads(answer.read())
                return value if value.get("pid") == self.learner.pid else {}
        except (OSError, ValueError, urllib.error.URLError):
            return {}

    def serving(self) -> list[str]:
        """Nodes that have made tokens for this learner, in this life of theirs."""
        return [
            n["name"] for n in self.status().get("nodes", ())
            if n["alive"] and n["ready"] and n["tokens"] > 0 and self.nodes[n["name"]].poll() is None
        ]  # fmt: skip

    def _waits(self, what: str, condition: Any, timeout: float = 300.0) -> Any:
        def look() -> Any:
            value = condition()
            if not value and self.learner.poll() is not None:
                raise AssertionError(f"the learner ended while waiting for {what}:\n{self.shoal.said(f'learner-{self.lives}')}")
            return value

        return wait_for(what, look, timeout)

    # --- the run -----------------------------------------------------------------------------------------------------

    def schedule(self) -> list[tuple[int, str]]:
        """(step, what): kills over the run, learner kills of both kinds in turn."""
        s, last = self.settings, max(1, self.settings.steps - 3)
        kills = [(self.rng.randint(1, last), "node") for _ in range(s.node_kills)]
        kills += [(self.rng.randint(2, last), ("head", "trainer")[i % 2]) for i in range(s.learner_kills)]
        return sorted(kills)

    def go(self) -> Account:
        started = time.monotonic()
        try:
            self.start_learner()
            wait_for("a ticket", (self.run_dir / "ticket.txt").exists, 240)
            for i in range(self.settings.nodes):
                self.start_node(f"node-{i + 1}")
            for step, what in self.schedule():
                self._waits(f"step {step}", lambda step=step: self.status().get("step", -1) >= step)
                victims = self._waits("a node that works", self.serving)
                time.sleep(self.rng.random() * 0.5)  # in the midst of whatever
                if what == "node":
                    self.kill_node(self.rng.choice(victims))
                else:
                    self.kill_learner(what)
            assert self.learner.wait(timeout=600) == 0, self.shoal.said(f"learner-{self.lives}")
            last = self.shoal.result(f"learner-{self.lives}")
            for name in (n["name"] for n in last["nodes"] if n["alive"]):  # one that was just starting found nobody
                assert self.nodes[name].wait(timeout=120) == 0, self.shoal.said(name)
            self._collect()
            self._check_continued()
            self._balance()
        finally:
            self.shoal.end()
        self.account.seconds = time.monotonic() - started
        return self.account

    def kill_node(self, name: str) -> None:
        """With its engine, which must not outlive it; started again at once."""
        node = self.nodes[name]
        children = psutil.Process(node.pid).children(recursive=True)
        node.send_signal(signal.SIGKILL)
        node.wait()
        psutil.wait_procs(children, timeout=60)
        assert not any(p.is_running() for p in children), "an engine outlived its node"
        self.account.node_kills += 1
        self.start_node(name)

    def kill_learner(self, what: str) -> None:
        children = psutil.Process(self.learner.pid).children(recursive=True)
        if what == "head":
            self.learner.send_signal(signal.SIGKILL)
            self.learner.wait()
        else:
            [trainer] = [p for p in children if "learner.trainer" in " ".join(p.cmdline())]
            trainer.send_signal(signal.SIGKILL)
            assert self.learner.wait(timeout=120) == 1
            said = self.shoal.said(f"learner-{self.lives}")
            assert "--resume" in said and "Traceback" not in said, said
        psutil.wait_procs(children, timeout=60)
        assert not any(p.is_running() for p in children), "the trainer outlived its head"
        self.account.learner_kills.append(what)
        self._collect()
        self._check_continued()
        self._take_stock()
        self.start_learner()
        self._waits("the resumed learner", lambda: self.status().get("epoch", 0) == self.lives)
        resumed = self.status()["resumed"]
        self.account.resumed_groups += resumed["groups"]
        self.account.resumed_tokens += resumed["tokens"]
        assert resumed["tokens"] == sum(self._left.values()), "the next learner did not take up what the journal held"

    # --- what it cost ------------------------------------------------------------------------------------------------

    def _lines(self, name: str) -> Iterator[list[Any]]:
        """What a process wrote down (the last line may be cut off)."""
        path = self.root / f"{name}.taps"
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def _taps(self, name: str) -> Iterator[tuple[Key, int, int, int]]:
        """((group, member), attempt, start, count) of every run of tokens that a process sent or accepted."""
        for kind, *values in self._lines(name):
            if kind in ("sent", "accepted"):
                request_id, start, count = values
                group, member, attempt = (int(part) for part in request_id.split("."))
                yield (group, member), attempt, start, count

    def _take_stock(self) -> None:
        """What the dead learner had accepted, against what its journal holds."""
        copy = self.root / f"stock-{self.lives}"
        copy.mkdir()
        for file in self.run_dir.glob("journal.sqlite*"):
            shutil.copy(file, copy)
        db = sqlite3.connect(copy / "journal.sqlite")
        reserved = {g: n for g, n in db.execute("SELECT group_id, samples FROM groups WHERE state = 'reserved'")}
        journaled: dict[Key, int] = defaultdict(int)
        for group, member, stop in db.execute(
            "SELECT group_id, member, max(start + length(ids) / 4) FROM pieces GROUP BY group_id, member"
        ):
            journaled[group, member] = stop
        db.close()
        accepted, sent = dict(journaled), dict(journaled)
        for key, _, start, count in self._taps(f"learner-{self.lives}"):
            accepted[key] = max(accepted.get(key, 0), start + count)
        for name in self.nodes:
            for key, attempt, start, count in self._taps(name):
                if attempt // ATTEMPTS == self.lives - 1:
                    sent[key] = max(sent.get(key, 0), start + count)
        for group, samples in reserved.items():
            for key in ((group, member) for member in range(samples)):
                again = accepted.get(key, 0) - journaled[key]
                assert again >= 0
                self.account.regenerated += again
                self.account.regenerated_max = max(self.account.regenerated_max, again)
                self.account.in_flight += max(0, sent.get(key, 0) - accepted.get(key, 0))
        self._left = {(g, m): journaled[g, m] for g, n in reserved.items() for m in range(n)}

    def _check_continued(self) -> None:
        """In one life no position is accepted twice or left out; a resumed one begins just where the journal ended."""
        at = dict(self._left)
        for key, _, start, count in self._taps(f"learner-{self.lives}"):
            assert start == at.get(key, 0), f"{key} goes on at {start}, it stood at {at.get(key, 0)}"
            at[key] = start + count
            self.account.accepted += count

    def _collect(self) -> None:
        """The groups that this life finished. One that the kill kept from the journal is finished again by the next."""
        for kind, *values in self._lines(f"learner-{self.lives}"):
            for group in unpack_groups(base64.b64decode(values[0])) if kind == "finished" else ():
                for member, t in enumerate(group.trajectories):
                    known = self.trajectories.setdefault((group.task_index, member), t)
                    same = known.completion_ids == t.completion_ids and known.seed == t.seed
                    assert same or not self.settings.frozen, "the same sample came out in two ways"

    def _balance(self) -> None:
        run = json.loads((self.run_dir / "run.json").read_text())["run"]
        with Journal.open(self.run_dir / "journal.sqlite", run) as journal:
            counts = journal.counts()
            consumed = [row[0] for row in journal._db.execute("SELECT group_id FROM consumed")]
            steps = [row[0] for row in journal._db.execute("SELECT step FROM commits ORDER BY step")]
        assert len(consumed) == len(set(consumed)) == GROUPS * self.settings.steps, "a group was consumed twice, or is missing"
        assert steps == list(range(1, self.settings.steps + 1))
        self.account.lost = counts.groups.lost + counts.trajectories.lost
        self.account.aborted = dict(Counter(counts.groups.aborted))
        self.account.consumed = len(consumed)


def differing(ours: dict[Key, Trajectory], others: dict[Key, Trajectory]) -> list[Key]:
    """Samples that both runs have, and that came out with other tokens, or under another seed."""
    both = sorted(set(ours) & set(others))
    assert len(both) > len(ours) / 2, f"{len(both)} samples in common of {len(ours)} and {len(others)}"
    return [k for k in both if (ours[k].completion_ids, ours[k].seed) != (others[k].completion_ids, others[k].seed)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=(__doc__ or "").splitlines()[0])
    for name, value in asdict(Settings()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(flag, type=int, default=value)
    parser.add_argument("--compare", action="store_true", help="with the completions of a second run, which nothing disturbs")
    arguments = vars(parser.parse_args())
    compare = arguments.pop("compare")
    settings = Settings(**arguments)
    root = Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
    model = random_model(root / "model")
    chaos = Chaos(root / "run", model, settings)
    result: dict[str, Any] = {"settings": asdict(settings)} | asdict(chaos.go())
    if compare:
        quiet = Chaos(root / "quiet", model, replace(settings, node_kills=0, learner_kills=0, frozen=True))
        quiet.go()
        both = set(chaos.trajectories) & set(quiet.trajectories)
        result["compared"] = len(both)
        result["compared_tokens"] = sum(len(quiet.trajectories[k].completion_ids) for k in both)
        result["differing"] = differing(chaos.trajectories, quiet.trajectories)
    print(json.dumps(result))
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
