"""The faults of a measured broadcast, and its bound T* under them. Pure values and numbers.

Times are in seconds from the publication, rates in bit/s. Must not know processes, nor how a fault is caused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import Field

from learner.section import Section
from netem.networks.bound import profile_bound
from netem.networks.profile import LEARNER, Profile


class HostFault(Section):
    """Something that happens to one host, `at` seconds after the publication."""

    at: float = Field(ge=0)
    host: str


class Kill(HostFault):
    """The host's program is gone for good."""

    kind: Literal["kill"] = "kill"


class Stop(HostFault):
    """The host's program is stopped (SIGSTOP): its connections stay and nothing moves."""

    kind: Literal["stop"] = "stop"


class Continue(HostFault):
    """The host's stopped program goes on (SIGCONT)."""

    kind: Literal["cont"] = "cont"


class Join(HostFault):
    """The host's program starts only now."""

    kind: Literal["join"] = "join"


class Corrupt(HostFault):
    """From then on every chunk that the host sends has a wrong byte in it."""

    kind: Literal["corrupt"] = "corrupt"


class Withhold(HostFault):
    """From then on the host sends no chunk any more, not even those seeded to it. It still receives and announces chunks."""

    kind: Literal["withhold"] = "withhold"


class SetRates(HostFault):
    """The host's access link has these rates from then on, in bit/s."""

    kind: Literal["rate"] = "rate"
    up: float
    down: float


class Outage(HostFault):
    """For `seconds` no packet leaves or reaches the host; without a host, none of all hosts."""

    kind: Literal["outage"] = "outage"
    host: str = ""
    seconds: float = Field(gt=0)


Fault = Kill | Stop | Continue | SetRates | Outage | Join | Corrupt | Withhold
Turn = Corrupt | Withhold
"""Faults in which the host's program cheats the others, for good."""


def in_order(faults: Sequence[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: fault.at)


def excused(faults: Sequence[Fault]) -> set[str]:
    """Hosts that a round does not wait for: killed, stopped for good, or cheating."""
    out: set[str] = set()
    for fault in in_order(faults):
        if isinstance(fault, Kill | Stop | Turn):
            out.add(fault.host)
        elif isinstance(fault, Continue):
            out.discard(fault.host)
    return out


def joiners(faults: Sequence[Fault]) -> dict[str, float]:
    """Late hosts -> seconds after the publication at which each one joins."""
    return {fault.host: fault.at for fault in faults if isinstance(fault, Join)}


def bound_under(profile: Profile, payload_bytes: int, faults: Sequence[Fault], required: Collection[str]) -> float:
    """T* with faults, in seconds: the fluid rate (`bound.best_rate`) integrated over the rates in force, until the hosts of
    `required` have the payload.

    Until a fault meets it, a host that is not required is fed like the others; after that it only lends its uplink, if it has
    one left. A joiner needs from its start at least what its downlink and all uplinks together take; that it joined does not
    slow down the others. Sites are left out, as in `profile_bound`, which this is without faults. Infinite if it never ends.
    """
    if not faults:
        return profile_bound(profile, payload_bytes)
    state = _State(profile, set(joiners(faults)), required)
    bits, now = 8.0 * payload_bytes, 0.0
    changes = _changes(faults)
    while True:
        rate = state.rate()
        until = changes[0][0] if changes else float("inf")
        if rate > 0 and bits <= (until - now) * rate:
            now += bits / rate
            break
        if not changes:
            return float("inf")
        bits, now = bits - (until - now) * rate, until
        state.apply(changes.pop(0))
    uplinks = sum(h.access.up for h in profile.hosts)
    late = [
        at + 8.0 * payload_bytes / min(profile.host(h).access.down, uplinks) for h, at in joiners(faults).items() if h in required
    ]
    return max(now, *late) if late else now


def _changes(faults: Sequence[Fault]) -> list[tuple[float, Fault, bool]]:
    """(time, fault, whether it begins) in order of time; an outage also ends."""
    out: list[tuple[float, Fault, bool]] = [(fault.at, fault, True) for fault in faults]
    out += [(fault.at + fault.seconds, fault, False) for fault in faults if isinstance(fault, Outage)]
    return sorted(out, key=lambda change: change[0])


class _State:
    def __init__(self, profile: Profile, late: Collection[str], required: Collection[str]) -> None:
        self._required = set(required) - set(late)
        self._up = {h.name: h.access.up for h in profile.hosts if h.name not in late}
        self._down = {h.name: h.access.down for h in profile.hosts}
        self._fed = {name for name in self._up if name != LEARNER}
        self._halted: set[str] = set()
        self._dark: dict[str, int] = dict.fromkeys([*self._down, ""], 0)

    def rate(self) -> float:
        if not self._fed:
            return float("inf")
        dark = {name for name in self._down if self._dark[name] or self._dark[""] or name in self._halted}
        up = {name: 0.0 if name in dark else rate for name, rate in self._up.items()}
        down = min(0.0 if name in dark else self._down[name] for name in self._fed)
        return min(up[LEARNER], down, sum(up.values()) / len(self._fed))

    def apply(self, change: tuple[float, Fault, bool]) -> None:
        _, fault, begins = change
        match fault:
            case Kill() | Stop() | Corrupt() | Withhold():  # a host that cheats counts as gone: its uplink is of no use
                self._halted.add(fault.host)
            case Continue():
                self._halted.discard(fault.host)
            case SetRates():
                self._down[fault.host] = fault.down
                if fault.host in self._up:
                    self._up[fault.host] = fault.up
            case Outage():
                self._dark[fault.host] += 1 if begins else -1
        if not isinstance(fault, Join) and fault.host and fault.host not in self._required:
            self._fed.discard(fault.host)
