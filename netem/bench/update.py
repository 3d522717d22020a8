"""`shoal bench update`: one sparse update of a large model through everything, stage by stage.

A learner, its trainer (this process, by the client that any trainer may use) and nodes, real processes over loopback; the nodes
have the base model on their disks, and engines that hold no tensors. Weights are Gaussian in the shapes of an 8B model, as many
layers as were asked for.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.client.client import LearnerClient
from learner.config import build_config, dump_toml
from learner.status.source import fetch_status
from learner.tasks.registry import make_task
from netem.bench.codec.bench import LAYER_8B
from netem.bench.codec.model_updates import gaussian_update
from netem.demo.tiny_model import build_demo_model
from netem.processes.children import Children, wait_for
from p2p.errors import UsageError

WAIT_S = 600.0
DISK = 4
"""Times the state for the learner, and as much for each node: states in turn, chunks, and room."""

TAPPED = "netem.bench.chaos.tapped"
"""The module that is `shoal`, and writes down what it does."""

TIME = {"relayed": 0, "received": 1, "installed": 1, "made": 3}
"""Where its lines have their time (`netem.bench.chaos.tapped`)."""

Tensors = dict[str, tuple[str, np.ndarray]]


def bench_update(layers: int, nodes: int, share: float, folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench update --json` prints. UsageError where numbers make no sense or the disk has no room; ShoalError when
    somebody does not get there."""
    if layers < 1 or nodes < 1 or not 0 < share <= 1:
        raise UsageError(f"{layers} layers, {nodes} nodes, {share} changed: want 1 or more, and a share of at most 1")
    size = 2 * layers * sum(int(np.prod(shape)) for shape in LAYER_8B)
    with tempfile.TemporaryDirectory(prefix="shoal-update-", dir=folder) as name:
        free = shutil.disk_usage(name).free
        if free < DISK * (nodes + 1) * size:
            raise UsageError(f"{name} has {free >> 20} MiB free, {DISK * (nodes + 1) * size >> 20} are needed")
        with Children(Path(name) / "logs") as children:
            return _UpdateRun(Path(name), children, say).go(layers, nodes, share, size)


class _UpdateRun:
    def __init__(self, folder: Path, children: Children, say: Callable[[str], None]) -> None:
        self.folder, self.children, self.say = folder, children, say
        self.run_dir = folder / "run"

    def go(self, layers: int, nodes: int, share: float, size: int) -> dict[str, Any]:
        self.say(f"making a state of {size / 1e9:.2f} GB, and one with {share:.1%} of its values changed")
        base, new, changed = self._states(layers, share)
        model = build_demo_model(self.folder / "tiny", make_task("reverse"), steps=1)
        config = {
            "run_dir": str(self.run_dir), "model": str(model), "external_trainer": True, "task": {"name": "reverse"},
            "swarm": {"listen": ["/ip4/127.0.0.1/tcp/0"], "squash_every": 0},
            "rollout": {"groups_per_step": 1, "samples": 1, "max_new_tokens": 1},
        }  # fmt: skip
        (self.folder / "learner.toml").write_text(dump_toml(build_config(config, "bench").model_dump()))
        self._start("learner", "learner", str(self.folder / "learner.toml"), "--json")
        self._until("the learner to start", lambda: (self.run_dir / "status.json").exists())
        client = LearnerClient.connect(self.run_dir)
        try:
            client.resume()
            began = time.perf_counter()
            client.publish(0, base)
            first_s = time.perf_counter() - began
            self.say(f"the first version, whole, took the trainer {first_s:.1f} s")
            for i in range(1, nodes + 1):
                self._start(f"node-{i}", *(
                    "node", "--join", str(self.run_dir / "ticket.txt"), "--dir", str(self.folder / f"node-{i}"),
                    "--listen", "/ip4/127.0.0.1/tcp/0", "--name", f"node-{i}", "--engine", "fake",
                    "--base-model", str(self.folder / "base"), "--json",
                ))  # fmt: skip
            self._until("the nodes to hold the base model", lambda: self._at(nodes, "1.0"))
            time.sleep(2)
            for step, tensors in ((1, new), (2, base)):  # there and back: the second time is every further time
                self.say(f"publishing update {step}")
                began, began_at = time.perf_counter(), time.monotonic()
                client.publish(step, tensors)
                publish_s = time.perf_counter() - began
                self._until("the nodes to install it", lambda step=step: self._at(nodes, f"1.{step}"))  # type: ignore[misc]
                self._until("a token of it", lambda step=step: any(self._taps("node-", "made", f"1.{step}")))  # type: ignore[misc]
                time.sleep(1)
            client.log(2, {})
            status = fetch_status(self.run_dir)
        finally:
            client.close()
        metrics, stages = status["metrics"], client.stages
        copied, encoded = stages["copy"], stages["copy"] + stages["encode"]
        timeline = {
            "copied": copied,
            "first_chunk": min(at for at in self._taps("learner", "relayed", "") if at > began_at) - began_at,
            "encoded": encoded,
            "sealed": encoded + stages["digest"],
            "last_received": max(self._taps("node-", "received", "1.2")) - began_at,
            "first_installed": min(self._taps("node-", "installed", "1.2")) - began_at,
            "last_installed": max(self._taps("node-", "installed", "1.2")) - began_at,
            "first_token": min(self._taps("node-", "made", "1.2")) - began_at,
        }
        own = [n for n in status["nodes"] if n["alive"]]
        return {
            "ok": True, "state_bytes": size, "layers": layers, "nodes": nodes, "changed": changed, "values": size // 2,
            "delta_bytes": metrics["broadcast/bytes"], "from_learner_bytes": metrics["broadcast/seed_egress_bytes"],
            "cores": len(os.sched_getaffinity(0)), "timeline": timeline, "load": os.getloadavg()[0],
            "stages": {
                "whole_first_s": first_s, "copy_s": stages["copy"], "encode_s": stages["encode"], "digest_s": stages["digest"],
                "publish_s": publish_s, "node_transfer_s": max(n["transfer_s"] for n in own),
                "node_apply_s": max(n["apply_s"] for n in own), "node_pause_s": max(n["pause_s"] for n in own),
                "last_node_s": metrics["broadcast/max_s"],
            },
        }  # fmt: skip

    def _states(self, layers: int, share: float) -> tuple[Tensors, Tensors, int]:
        """(before, after, values changed). Before is also the base model that nodes are given."""
        from safetensors.torch import save_file

        (self.folder / "base").mkdir()
        both: tuple[Tensors, Tensors] = {}, {}
        changed = 0
        for layer in range(layers):
            update = gaussian_update("layer", LAYER_8B, share, seed=layer)
            changed += update.changed
            at, tensors = 0, {}
            for number, shape in enumerate(LAYER_8B):
                name, count = f"layers.{layer}.{number}", int(np.prod(shape))
                for tensors_of, words in zip(both, (update.old, update.new), strict=True):
                    tensors_of[name] = "bfloat16", words[at : at + count].reshape(shape)
                tensors[name] = torch.from_numpy(update.old[at : at + count].view(np.int16)).view(torch.bfloat16).reshape(shape)
                at += count
            save_file(tensors, str(self.folder / "base" / f"model-{layer}.safetensors"))
        return *both, changed

    def _start(self, name: str, *arguments: str) -> None:
        """`shoal ARGUMENTS`, which writes down what it does when."""
        self.children.start(name, str(self.folder / f"{name}.taps"), *arguments, module=TAPPED)

    def _taps(self, name: str, kind: str, version: str) -> Iterator[float]:
        """When those whose names begin with `name` did it, by CLOCK_MONOTONIC; of any version where none is asked for."""
        for path in self.folder.glob(f"{name}*.taps"):
            for line in path.read_text().splitlines():
                try:
                    found, *values = json.loads(line)
                except ValueError:
                    continue  # the last line, which is being written
                if found == kind and (not version or version in values):
                    yield values[TIME[kind]]

    def _at(self, nodes: int, version: str) -> bool:
        found = fetch_status(self.run_dir)["nodes"]
        return sum(n["alive"] and n["version"] == version for n in found) == nodes

    def _until(self, what: str, ready: Callable[[], bool]) -> None:
        wait_for(what, ready, WAIT_S, self.children.all)


def describe(result: dict[str, Any]) -> str:
    """A few lines for people."""
    stages = result["stages"]
    return "\n".join([
        f"{result['state_bytes'] / 1e9:.2f} GB of state, {result['changed'] / result['values']:.2%} changed: a delta of "
        f"{result['delta_bytes'] / 1e6:.2f} MB ({8 * result['delta_bytes'] / result['changed']:.2f} bits a change), "
        f"{result['nodes']} nodes, {result['cores']} cores for all",
        f"trainer: copied in {stages['copy_s']:.2f} s, encoded, hashed and stored in {stages['encode_s']:.2f} s while chunks "
        f"leave, digests of all tensors {stages['digest_s']:.2f} s",
        f"node: received and decoded in {stages['node_transfer_s']:.2f} s, digests checked as tensors become whole; engine "
        f"{stages['node_apply_s']:.2f} s, paused {stages['node_pause_s']:.3f} s",
        f"from the beginning of encoding to the last node's installed state: {stages['last_node_s']:.2f} s "
        f"({result['state_bytes'] / 1e9 / stages['last_node_s']:.2f} GB of state a second)",
        "seconds from the end of the optimizer step, at load " + f"{result['load']:.1f}: "
        + ", ".join(f"{name.replace('_', ' ')} {at:.2f}" for name, at in result["timeline"].items()),
    ])  # fmt: skip
