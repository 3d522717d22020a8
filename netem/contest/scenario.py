"""A scenario: a network, a payload, a policy, faults at given times, and the requirements on the result.

Pure: TOML text or values in, frozen values out, and a verdict over results. Must not know processes, clocks or namespaces.
Those that come with Shoal are files in netem/scenarios.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from learner.section import Section, check_section, read_toml
from netem.networks.bound import profile_bound
from netem.networks.faults import (
    Continue,
    Corrupt,
    Fault,
    HostFault,
    Join,
    Kill,
    Outage,
    SetRates,
    Stop,
    Turn,
    Withhold,
    bound_under,
    excused,
    in_order,
    joiners,
)
from netem.networks.profile import LEARNER, Profile, build_profile, load_profile
from p2p.broadcast.peer_groups import MESH
from p2p.errors import UsageError

if TYPE_CHECKING:
    from netem.contest.contest import RoundResult

FOLDER = Path(__file__).parent / "scenarios"
"""The scenarios that come with Shoal."""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
"""Unit of a payload's size -> bytes."""

MAX_PAYLOAD = 1 << 40
"""Bytes of a payload, at most: above any model's weights, so that a slip of a unit is refused."""


class Require(Section):
    """What must come of a scenario. None asks for nothing."""

    ratio: float | None = Field(default=None, ge=1)
    """The median of the warm rounds takes at most so many times T*, and `slack_s`."""
    slack_s: float = Field(default=0.0, ge=0)
    """Seconds beyond `ratio` times T*."""
    complete: Literal["all"] | list[str] = "all"
    """Hosts that must have the whole payload. "all" are those that are neither killed, stopped for good nor turned against the
    others."""
    source_share: float | None = Field(default=None, gt=0)
    """The source sends at most so many times the payload."""
    joiner_share: float | None = Field(default=None, gt=0, le=1)
    """A late host has at most this share of the payload from the source."""
    site_share: float | None = Field(default=None, ge=1)
    """The hosts of one site together have at most so many times the payload from hosts that are not at it."""
    named: list[str] | None = None
    """Hosts that are convicted of a wrong chunk: reported to the source, and dropped by all that a round waits for. No other host
    may be named."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario, checked."""

    name: str
    profile: Profile
    payload_bytes: int
    policy: str
    rounds: int
    """rounds that count; with faults there is one, in which they happen"""
    warm_up: int
    """rounds before those that count: the first one after joining has cold TCP streams and knows no rates"""
    seed: int
    faults: tuple[Fault, ...]
    require: Require
    mesh: int = MESH
    """with more nodes than this they are linked in groups (default policy only)"""

    @property
    def required(self) -> tuple[str, ...]:
        """Hosts that a round waits for."""
        if isinstance(self.require.complete, list):
            return tuple(self.require.complete)
        return tuple(h.name for h in self.profile.hosts[1:] if h.name not in excused(self.faults))

    @property
    def t_star(self) -> float:
        """T* in seconds, faults included, of a round that counts."""
        return bound_under(self.profile, self.payload_bytes, self.faults, self.required)

    @property
    def t_star_calm(self) -> float:
        """T* in seconds without faults, which is that of a warm-up round."""
        late = joiners(self.faults)
        there = tuple(h for h in self.profile.hosts if h.name not in late)
        return profile_bound(replace(self.profile, hosts=there), self.payload_bytes)

    def with_mtu(self, mtu: int) -> Scenario:
        return replace(self, profile=replace(self.profile, mtu=mtu))


def judge(scenario: Scenario, results: Sequence[RoundResult]) -> list[str]:
    """The requirements that do not hold, one sentence each; `results` are of all rounds, warm-up included."""
    wrong = [f"round {i}: {failure}" for i, r in enumerate(results, start=1) for failure in r.failures]
    wrong += [f"round {i} was cut off" for i, r in enumerate(results, start=1) if r.cut_off]
    counted, require = results[scenario.warm_up :], scenario.require
    if len(counted) < scenario.rounds and not wrong:
        wrong.append(f"{len(counted)} of {scenario.rounds} rounds were run")
    for number, result in enumerate(counted, start=scenario.warm_up + 1):
        missing = [name for name in scenario.required if name not in result.verified]
        if missing:
            wrong.append(f"round {number}: incomplete at {', '.join(missing)}")
        never = [fault for fault in in_order(scenario.faults) if fault not in result.faults]
        if never and not (result.failures or result.cut_off):
            wrong.append(f"round {number} was over before {type(never[0]).__name__.lower()} at {never[0].at:g} s")
        share = result.source_bytes / scenario.payload_bytes
        if require.source_share is not None and share > require.source_share:
            wrong.append(f"round {number}: the source sent {share:.3f} of the payload, at most {require.source_share:g}")
        for host in joiners(scenario.faults):
            share = result.from_source.get(host, scenario.payload_bytes) / scenario.payload_bytes
            if require.joiner_share is not None and share > require.joiner_share:
                wrong.append(f"round {number}: {host} had {share:.3f} of it from the source, at most {require.joiner_share:g}")
        if require.site_share is not None:
            wrong += [f"round {number}: {what}" for what in _crossed_too_much(require.site_share, scenario, result)]
        if require.named is not None:
            wrong += [f"round {number}: {what}" for what in _misnamed(require.named, scenario.required, result)]
    times = [finish(scenario, result) for result in counted]
    if require.ratio is not None and times and median(times) > require.ratio * scenario.t_star + require.slack_s:
        slack = f" and {require.slack_s:g} s" if require.slack_s else ""
        what = f"{median(times):.2f} s is {median(times) / scenario.t_star:.3f} times T* ({scenario.t_star:.2f} s)"
        wrong.append(f"{what}, at most {require.ratio:g} times{slack}")
    return wrong


def _crossed_too_much(limit: float, scenario: Scenario, result: RoundResult) -> list[str]:
    wrong = [f"{name} does not say whence it had what" for name in scenario.required if name not in result.whence]
    for site, share in crossed(scenario, result).items():
        if share > limit:
            wrong.append(f"{share:.3f} of it came to {site} over the WAN, at most {limit:g}")
    return wrong


def crossed(scenario: Scenario, result: RoundResult) -> dict[str, float]:
    """site -> bytes that its hosts had from hosts elsewhere, as a multiple of the payload; only of hosts that report it."""
    site_of = {host.name: host.site for host in scenario.profile.hosts}
    came = dict.fromkeys((site for site in site_of.values() if site and site != scenario.profile.learner.site), 0)
    for host, whence in result.whence.items():
        if site_of[host] in came:
            came[site_of[host]] += sum(size for other, size in whence.items() if site_of.get(other) != site_of[host])
    return {site: size / scenario.payload_bytes for site, size in came.items()}


def _misnamed(named: Collection[str], required: Collection[str], result: RoundResult) -> list[str]:
    """The violations of `Require.named`, one sentence each."""
    wrong = [f"{host} was named, and did nothing" for host in sorted({*result.named, *result.reported} - {*named})]
    for host in named:
        if host not in result.named:
            wrong.append(f"nobody named {host}")
        if host not in result.reported:
            wrong.append(f"{host} was not reported to the source")
        keep = [name for name in required if name not in result.banned.get(host, ())]
        if keep:
            wrong.append(f"{host} was not dropped by {', '.join(keep)}")
    return wrong


def finish(scenario: Scenario, result: RoundResult) -> float:
    """Seconds until the last host that a round waits for had the payload; infinite if one never had it. For a late host the
    seconds that its player took to start are left out."""
    late, times = joiners(scenario.faults), []
    for host in scenario.required:
        at = result.verified.get(host, float("inf"))
        if host in late and host in result.joined:
            at = max(late[host], at - (result.joined[host] - late[host]))
        times.append(at)
    return max(times)


# --- the file ------------------------------------------------------------------------------------------------------------


class _Rate(HostFault):
    """`SetRates` as a file has it, in Mbit/s."""

    kind: Literal["rate"]
    up_mbit: float = Field(gt=0)
    down_mbit: float = Field(gt=0)

    def fault(self) -> Fault:
        """The same in bit/s."""
        return SetRates(at=self.at, host=self.host, up=self.up_mbit * 1e6, down=self.down_mbit * 1e6)


FileFault = Kill | Stop | Continue | Join | Corrupt | Withhold | _Rate | Outage
KINDS = tuple(get_args(kind.model_fields["kind"].annotation)[0] for kind in get_args(FileFault))
"""Values of a fault's `kind`, which tells pydantic its type."""


class _File(Section):
    name: str = Field(default="", pattern=r"^[a-z0-9-]{0,40}$")
    profile: str | dict[str, Any]
    payload: int | str
    policy: Literal["shoal", "star", "chain", "tree"] = "shoal"
    rounds: int = Field(default=1, ge=1, le=1000)
    warm_up: int = Field(default=1, ge=0, le=100)
    seed: int = Field(default=0, ge=0)
    mesh: int = Field(default=MESH, ge=2, le=MESH)
    faults: list[Annotated[FileFault, Field(discriminator="kind")]] = Field(default_factory=list)
    require: Require = Field(default_factory=Require)

    @model_validator(mode="after")
    def _one_round(self) -> _File:
        if self.faults and self.rounds != 1:
            raise ValueError("rounds: with faults there is one round that counts")
        return self


def builtin_scenarios() -> list[str]:
    """Names of the scenarios that come with Shoal."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_scenario(name_or_file: str) -> Scenario:
    """The scenario in a file, or the one of that name that comes with Shoal. UsageError when there is neither."""
    if name_or_file in builtin_scenarios():
        return load_scenario(FOLDER / f"{name_or_file}.toml")
    path = Path(name_or_file)
    if path.suffix == ".toml" or path.is_file():
        return load_scenario(path)
    raise UsageError(f"no scenario {name_or_file!r}: a file, or one of {', '.join(builtin_scenarios())}")


def load_scenario(file: str | Path) -> Scenario:
    """Read a scenario. UsageError, one line that names the key, for anything wrong."""
    path = Path(file)
    values = read_toml(path, "scenario")
    return build_scenario(values, str(path), path.stem, path.parent)


def build_scenario(values: dict[str, Any], source: str, name: str = "scenario", folder: Path = Path()) -> Scenario:
    """A scenario from plain values; its profile's path is relative to `folder`. UsageError names `source` and the wrong key."""
    file = check_section(_File, values, source, leave_out=KINDS)
    name = file.name or name
    if isinstance(file.profile, str):
        profile = load_profile(folder / file.profile)
    else:
        profile = build_profile(file.profile, f"{source}: profile", name)
    faults = tuple(in_order([f.fault() if isinstance(f, _Rate) else f for f in file.faults]))
    _check_faults(source, faults, {h.name for h in profile.hosts})
    if faults and any(profile.gateway(host) is not host for host in profile.hosts):
        raise UsageError(f"{source}: faults: T* under faults does not know hosts that share a router")
    require = file.require
    for host in require.complete if isinstance(require.complete, list) else ():
        if host == LEARNER or host not in {h.name for h in profile.hosts}:
            raise UsageError(f"{source}: require.complete: no node {host!r}")
        if host in excused(faults):
            raise UsageError(f"{source}: require.complete: {host} is killed, stopped or turned")
    for host in require.named or ():
        if not any(isinstance(fault, Corrupt) and fault.host == host for fault in faults):
            raise UsageError(f"{source}: require.named: {host} corrupts nothing")
    size = payload_size(file.payload, source)
    if require.site_share is not None and not profile.sites:
        raise UsageError(f"{source}: require.site_share: no host is at a site")
    scenario = Scenario(
        name, profile, size, policy=file.policy, rounds=file.rounds, warm_up=file.warm_up, seed=file.seed,
        faults=faults, require=require, mesh=file.mesh,
    )  # fmt: skip
    if not scenario.required:
        raise UsageError(f"{source}: require.complete: nobody")
    if not isfinite(scenario.t_star):
        raise UsageError(f"{source}: faults: with these the broadcast never ends")
    return scenario


def _check_faults(source: str, faults: Sequence[Fault], hosts: Collection[str]) -> None:
    late = joiners(faults)
    for fault in faults:
        if fault.host not in hosts and not (isinstance(fault, Outage) and not fault.host):
            raise UsageError(f"{source}: faults: no host {fault.host!r}")
        if fault.host == LEARNER and not isinstance(fault, SetRates | Outage):
            raise UsageError(f"{source}: faults: the learner is the source of every round")
        if isinstance(fault, Kill | Stop | Continue | Turn) and fault.at < late.get(fault.host, 0.0):
            raise UsageError(f"{source}: faults: {fault.host} has not joined at {fault.at:g} s")
    if len(late) < sum(isinstance(fault, Join) for fault in faults):
        raise UsageError(f"{source}: faults: a host joins once")
    if len(late) == len(hosts) - 1:
        raise UsageError(f"{source}: faults: every node joins late")


def payload_size(value: int | str, source: str) -> int:
    """Bytes of `value`: a number, or "32 MiB". UsageError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", str(value))
    if found is None or found[2] not in UNITS:
        raise UsageError(f'{source}: payload: {value!r} is no size: bytes, or as in "32 MiB"')
    size = round(float(found[1]) * UNITS[found[2]])
    if not 1 <= size <= MAX_PAYLOAD:
        raise UsageError(f"{source}: payload: {size} bytes, at least 1 and at most {MAX_PAYLOAD}")
    return size
