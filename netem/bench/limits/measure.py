"""Whether limits hold on the wire: hosts in network namespaces on one bridge, versions without end, and the counters of their
network cards. Needs Linux and root: `python -m netem.bench.limits.measure [--source N] [--up N] [--down N]`.

Four hosts of unbounded links: a source with `max_up_mbit`, a node with `max_up_mbit`, one with `max_down_mbit`, and a free one.
Which of them is the bottleneck, and so at its limit, follows from the rates.
What is told is the most that went over each limited card in any ten seconds, over the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

from netem.processes.children import start_module
from p2p.processes import end

HOSTS = ("source", "upper", "downer", "free")
"""Names of the hosts."""

START_S = 8.0
"""Seconds after the first version's bytes that are left out: links come up, and shares are told."""

SAMPLE_S = 0.1
"""Seconds between two readings of the counters."""

WINDOW_S = 10.0
"""Seconds over which a limit is to be kept."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _counter(device: str, which: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/{which}_bytes").read_text())


def worst(samples: list[tuple[float, int]], since: float) -> float:
    """The most bytes a second over any WINDOW_S of `samples` (time, bytes so far) from `since` on."""
    kept = [s for s in samples if s[0] >= since]
    span = round(WINDOW_S / SAMPLE_S)
    return max((b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(kept, kept[span:], strict=False))


def measure(limits: dict[str, dict[str, float]], seconds: float, nbytes: int) -> dict[str, dict[str, float]]:
    """By host and what is limited: Mbit/s of the worst ten seconds, of the whole time, and the first over the limit."""
    hosts = {name: f"10.78.0.{i + 1}" for i, name in enumerate(HOSTS)}
    readings: dict[tuple[str, str], list[tuple[float, int]]] = {}
    children = []
    bridge = "shlim"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for name in HOSTS:
            space, outer = f"shlim-{name}", f"sl-{name}"
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", bridge, "up")
            within = ("netns", "exec", space, "ip")
            _ip(*within, "addr", "add", f"{hosts[name]}/24", "dev", "eth0")
            # One packet at a time, so that the card's counter shows each packet's headers.
            _ip(*within, "link", "set", "eth0", "gso_max_segs", "1", "up")
            _ip(*within, "link", "set", "lo", "up")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # players write until they are killed
            for name in HOSTS:
                role: dict[str, object] = {
                    "role": "source" if name == "source" else "node", "name": name, "address": hosts[name],
                    "source": "source", "hosts": hosts,
                    "directory": f"{folder}/{name}", "options": {}, "site": "", "late": [],
                }  # fmt: skip
                said = json.dumps({"role": role, "limits": limits[name], "bytes": nbytes})
                out, log = Path(folder) / f"{name}.out", Path(folder) / f"{name}.log"
                inside = ("ip", "netns", "exec", f"shlim-{name}")
                children.append(start_module("netem.bench.limits.player", (said,), out, log, inside))
            while _counter("sl-source", "rx") < nbytes // 4:
                if any(child.poll() is not None for child in children):
                    raise RuntimeError("a player ended")
                time.sleep(0.2)
            began = time.monotonic()
            while time.monotonic() - began < START_S + seconds:
                for name in HOSTS:
                    # The bridge's end: what it receives, the host has sent.
                    for key, which in (("max_up_mbit", "rx"), ("max_down_mbit", "tx")):
                        count = _counter(f"sl-{name}", which)
                        readings.setdefault((name, key), []).append((time.monotonic(), count))
                time.sleep(SAMPLE_S)
            if any(child.poll() is not None for child in children):
                raise RuntimeError("a player ended")
    finally:
        end(children, 0.0)
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", f"shlim-{name}"], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)
    found = {}
    for (name, key), samples in readings.items():
        since = began + START_S
        most = worst(samples, since) / 125_000
        kept = [s for s in samples if s[0] >= since]
        mean = (kept[-1][1] - kept[0][1]) / (kept[-1][0] - kept[0][0]) / 125_000
        limit = limits[name].get(key, 0.0)
        found[f"{name} {key}"] = {"worst_mbit": most, "mean_mbit": mean, "of_limit": most / limit if limit else 0.0}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--source", type=float, default=4.0, help="Mbit/s that may leave the source (0: no limit)")
    parser.add_argument("--up", type=float, default=2.0, help="Mbit/s that may leave one node")
    parser.add_argument("--down", type=float, default=2.0, help="Mbit/s that may come to another")
    parser.add_argument("--mib", type=float, default=8.0, help="payload of a version")
    chosen = parser.parse_args()
    wanted = {
        "source": {"max_up_mbit": chosen.source}, "upper": {"max_up_mbit": chosen.up}, "downer": {"max_down_mbit": chosen.down},
        "free": {},
    }  # fmt: skip
    for what, values in measure(wanted, chosen.seconds, int(chosen.mib * 2**20)).items():
        limit = f"{100 * values['of_limit']:6.1f} % of the limit" if values["of_limit"] else "no limit"
        print(f"{what:<22} worst 10 s {values['worst_mbit']:7.2f} Mbit/s, mean {values['mean_mbit']:7.2f} Mbit/s, {limit}")
