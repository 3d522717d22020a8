"""What a host may do at this moment: its limits, its clock, its day's bytes and what others use, put together. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.allowance.giving_way import GivesWay
from p2p.allowance.hours import LocalTime
from p2p.allowance.limits import HostLimits
from p2p.allowance.quota import DayCount


@dataclass(frozen=True, slots=True)
class Permission:
    """What holds now. Texts say why; "" is no hindrance."""

    rests: str = ""
    """no links at all"""
    idles: str = ""
    """links and versions, and nothing is generated"""
    keeps: str = ""
    """nothing is relayed"""
    relays: float | None = None
    """bytes a second that may leave for others' sake; None: no bound, 0: nothing"""


def permit(limits: HostLimits, clock: LocalTime, count: DayCount, others: GivesWay | None = None) -> Permission:
    """What `limits` allow at this time. `count` is of `clock.day`; `others` what is known of who else uses the host."""
    if limits.between is not None and not limits.between.holds(clock.minute):
        return Permission(rests=f"out of hours until {limits.between.opens} (its clock)", relays=0.0)
    if count.spent(limits.daily):
        return Permission(rests="quota used until midnight (its clock)", relays=0.0)
    idles, keeps = "", "quota nearly used, until midnight (its clock)" if count.saves(limits.daily) else ""
    if limits.gives_way and others is not None:
        idles = f"gives way: others use the {others.device}" if others.device else ""
        keeps = keeps or ("gives way: others use the uplink" if others.uplink else "")
    return Permission(idles=idles, keeps=keeps, relays=0.0 if keeps else limits.up or None)
