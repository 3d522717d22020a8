"""A run of real processes with an endpoint: a learner that trains, and nodes over loopback. Must not know what is asked of it.

Every process writes down its tokens (`netem.bench.chaos.tapped`), and training can be held at a step, so that one version is
served for as long as that takes. The model is small and random; each token depends sharply on those before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from learner.config import build_config, dump_toml
from learner.status.source import fetch_status
from netem.bench.chaos.run import TAPPED, WAIT_S, random_model
from netem.bench.chaos.tapped import HOLD
from netem.processes.children import POLITE_S, Children, LoggedProcess, wait_for
from p2p.errors import UsageError

ENDLESS = 1_000_000
"""Steps of a run that is ended by whoever watches it."""

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
"""For a tokenizer that has none: what was said, and a sign that asks for the answer."""

SETTINGS: Mapping[str, Any] = {
    "seed": 5, "task": {"name": "reverse", "options": {"digits": 6}}, "endpoint": {"listen": "127.0.0.1:0", "model": "policy"},
    "rollout": {"max_staleness": 2, "groups_per_step": 20, "samples": 4, "max_new_tokens": 48, "micro_batch_groups": 2},
    "swarm": {"segment_bytes": 131072, "anchor_every": 20, "listen": ["/ip4/127.0.0.1/tcp/0"]},
    "trainer": {"steps": ENDLESS, "lr": 3e-4, "served_dtype": "float32", "threads": 1, "eval_size": 0},
}  # fmt: skip
"""Of the learner. A step is so much that it takes seconds, and that the nodes are what it waits for."""


class ServedRun:
    """One run. Leaving its `with` block ends all of its processes."""

    def __init__(
        self, root: Path, settings: Mapping[str, Mapping[str, Any]], capacity: int = 8, wait_s: float = WAIT_S
    ) -> None:
        """`settings`: sections of the learner's configuration, over SETTINGS. `capacity`: sequences at once of each node.
        `wait_s`: seconds of the longest wait."""
        root.mkdir(parents=True, exist_ok=True)
        self.root, self.run_dir, self.model = root, root / "run", root / "model"
        self.children = Children(root)
        self.nodes: dict[str, LoggedProcess] = {}
        self._capacity, self._wait_s = capacity, wait_s
        values = json.loads(json.dumps(SETTINGS)) | {"run_dir": str(self.run_dir), "model": str(self.model)}
        for name, section in settings.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, Mapping) else section
        self._config = root / "learner.toml"
        self._config.write_text(dump_toml(build_config(values, "a served run").model_dump()))

    def __enter__(self) -> ServedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.children.end(POLITE_S)

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(self, nodes: int) -> None:
        """The model, the learner, and so many nodes, until all of them serve."""
        random_model(self.model)
        told = json.loads((self.model / "tokenizer_config.json").read_text())
        (self.model / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": CHAT_TEMPLATE}))
        self.learner = self.children.start(
            "learner", str(self.root / "learner.taps"), "learner", str(self._config), "--json", module=TAPPED
        )
        self.wait("an endpoint", (self.run_dir / "endpoint.json").exists)
        for number in range(1, nodes + 1):
            self.start_node(f"node-{number}")
        self.wait("nodes that serve", lambda: len(self.serving()) == nodes)

    def start_node(self, name: str) -> None:
        self.nodes[name] = self.children.start(
            name, str(self.root / f"{name}.taps"), "node", "--join", str(self.run_dir / "ticket.txt"), "--name", name, "--dir",
            str(self.root / name), "--capacity", str(self._capacity), "--listen", "/ip4/127.0.0.1/tcp/0", "--json", module=TAPPED,
        )  # fmt: skip

    def kill_node(self, name: str) -> None:
        """With SIGKILL; its engine must not outlive it."""
        node = self.nodes.pop(name)
        children = psutil.Process(node.pid).children(recursive=True)
        node.kill()
        node.wait()
        psutil.wait_procs(children, timeout=self._wait_s)

    def hold(self, step: int) -> None:
        """Train up to this step, and no further until `release`."""
        (self.root / HOLD).write_text(str(step))

    def release(self) -> None:
        (self.root / HOLD).unlink()

    # --- what there is -----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        url: str = json.loads((self.run_dir / "endpoint.json").read_text())["url"]
        return url

    @property
    def key(self) -> str:
        return (self.run_dir / "endpoint.key").read_text().strip()

    def status(self) -> dict[str, Any]:
        """The learner's status page; empty while it does not answer."""
        try:
            return fetch_status(self.run_dir)
        except UsageError:
            return {}

    def serving(self) -> dict[str, str]:
        """Name -> version of the living nodes that serve."""
        return {n["name"]: n["version"] for n in self.status().get("nodes", ()) if n["alive"] and n["ready"]}

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        """The first true value of `condition`. ShoalError when it does not come, or the learner ends before."""
        return wait_for(what, condition, self._wait_s, [self.learner])

    def wait_for_version(self, version: str) -> None:
        """Until all nodes serve it."""
        self.wait(f"version {version} everywhere", lambda: set(self.serving().values()) == {version})

    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def made(self, letter: str = "s") -> dict[str, list[tuple[str, int]]]:
        """Request id -> (node, tokens) in order, as nodes' engines made them: of serving, or of evaluation ("e")."""
        found: dict[str, list[tuple[str, int]]] = {}
        for path in sorted(self.root.glob("node-*.taps")):
            for line in path.read_text().splitlines():
                if line.startswith(f'["made", "{letter}.'):
                    _, request_id, _, count, *_ = json.loads(line)
                    found.setdefault(request_id, []).append((path.stem, count))
        return found
