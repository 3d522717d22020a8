"""What others use of this machine: read from /proc and, where its library is there, from NVML. Linux.

`sample` gives what was used over the last seconds; `giving_way` decides what that means. Must not know what follows from it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from p2p.allowance.giving_way import OthersUse
from p2p.allowance.meter import HostMeter

log = logging.getLogger("shoal.allowance")

SPAN_S = 3.0
"""Seconds over which use is measured: what is our own is known with a tenth of a second's delay, which is little of it."""

_TX_FIELD = 8
"""Which of the numbers behind an interface's name in /proc/net/dev counts the bytes that it sent."""


class OthersSampler:
    """`meter` knows what went over the wire for this process; its `counts` must be on. `gpu`: the engine runs on a GPU, so that
    is looked at, else the processor is. `proc`: where /proc is."""

    def __init__(self, meter: HostMeter, *, gpu: bool, proc: Path = Path("/proc")) -> None:
        self._meter, self._proc = meter, proc
        self._seen: deque[tuple[float, int, int, float, float]] = deque()
        """(when, sent by the interfaces, by us, busy seconds of all cores, by us)"""
        self._own = psutil.Process()
        self._nvml = _Nvml() if gpu else None
        self._gpu = gpu

    def sample(self, now: float) -> OthersUse:
        """To be called once a second; `now` in seconds."""
        sent = self._interfaces_sent()
        busy, own = (0.0, 0.0) if self._gpu else (_busy_s(), self._own_s())
        seen = self._seen
        seen.append((now, sent, self._meter.sent, busy, own))
        while len(seen) > 2 and now - seen[1][0] >= SPAN_S:
            seen.popleft()
        then, sent_then, ours_then, busy_then, own_then = seen[0]
        seconds = now - then
        if seconds < SPAN_S / 2:
            return OthersUse()
        up = max(0.0, (sent - sent_then) - (self._meter.sent - ours_then)) / seconds
        cores = os.cpu_count() or 1
        cpu = max(0.0, (busy - busy_then) - max(0.0, own - own_then)) / seconds / cores
        gpu = self._nvml.others(_pids(self._own)) if self._nvml is not None else None
        return OthersUse(up=up, gpu=gpu, cpu=None if self._gpu else min(1.0, cpu))

    def _interfaces_sent(self) -> int:
        """Bytes that left by the interfaces with a default route; by all but loopback where none has one."""
        sent: dict[str, int] = {}
        for line in self._lines("net/dev"):
            name, colon, numbers = line.partition(":")
            if colon and len(fields := numbers.split()) > _TX_FIELD:
                sent[name.strip()] = int(fields[_TX_FIELD])
        routed = {f[0] for line in self._lines("net/route") if len(f := line.split()) > 1 and f[1] == "00000000"}
        routed |= {
            f[-1] for line in self._lines("net/ipv6_route") if len(f := line.split()) > 9 and f[0] == "0" * 32 and f[1] == "00"
        }  # fmt: skip
        chosen = (routed - {"lo"}) & sent.keys() or sent.keys() - {"lo"}
        return sum(sent[name] for name in chosen)

    def _lines(self, name: str) -> list[str]:
        try:
            return (self._proc / name).read_text().splitlines()
        except OSError:
            return []

    def _own_s(self) -> float:
        """Seconds of processor of this process and those below it, which only grow while these live."""
        total = 0.0
        for process in _family(self._own):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def _busy_s() -> float:
    times = psutil.cpu_times()
    # guest is counted in user already; what waits for a disk is not busy
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return [process]


def _pids(process: psutil.Process) -> set[int]:
    return {one.pid for one in _family(process)}


class _Nvml:
    """The GPUs through NVML. Says once why they cannot be seen, where they cannot."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: list[Any] = []
        self._since = 0
        try:
            import pynvml  # type: ignore[import-not-found,unused-ignore]

            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._library = pynvml
        except Exception as error:  # its own classes, which are known only where it is
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._library = None
        log.warning("--yield: whether others use the GPU cannot be seen (%s; pip install nvidia-ml-py)", error)

    def others(self, own: set[int]) -> float | None:
        """The share of the busiest GPU that processes other than `own` used since the last look; None: not to be seen."""
        if self._library is None:
            return None
        worst = 0.0
        for handle in self._handles:
            try:
                used = self._library.nvmlDeviceGetProcessUtilization(handle, self._since)
            except Exception as error:
                if "not found" in str(error).lower():  # no process used it since then
                    continue
                self._give_up(error)
                return None
            self._since = max([self._since, *(one.timeStamp for one in used)])
            worst = max(worst, sum(one.smUtil for one in used if one.pid not in own) / 100)
        return min(1.0, worst)
