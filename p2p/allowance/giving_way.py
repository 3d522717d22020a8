"""Whether others use what a host shares: decided from samples, with hysteresis. Pure; it is told the time and what was seen.

Two thresholds and two times: a host gives way soon and comes back late, and what lies between the thresholds changes nothing.
So a host does not flap with every web page that its owner opens.
"""

from __future__ import annotations

from dataclasses import dataclass

UP_LEAST = 62_500.0
"""Bytes a second (0.5 Mbit/s) that others must send at the least to count: clocks, mail and chats stay below it."""

UP_SHARE = 0.1
"""Others count from this share of the uplink's rate on, where that is known and larger than UP_LEAST."""

DEVICE_SHARE = 0.25
"""Share of the GPU, or of all cores, that others must use to count: a desktop that is only looked at stays below it."""

STILL = 0.5
"""Others are gone when they use less than this share of what made them count."""

ENTER_S, LEAVE_S = 3.0, 20.0
"""Seconds for which others must use something until a host gives way, and be gone until it comes back."""


@dataclass(frozen=True, slots=True)
class OthersUse:
    """What others used over the last second, as far as can be seen. None: it cannot be seen."""

    up: float | None = None
    """bytes a second that they sent"""
    gpu: float | None = None
    """share of the busiest GPU, 0 to 1"""
    cpu: float | None = None
    """share of all cores, 0 to 1"""


class Hysteresis:
    """True after `value` was at least `enter` for `enter_s`, until it was below `leave` for `leave_s`."""

    def __init__(self, enter_s: float = ENTER_S, leave_s: float = LEAVE_S) -> None:
        self.on = False
        self._enter_s, self._leave_s = enter_s, leave_s
        self._since: float | None = None
        """since when the value says otherwise"""

    def look(self, now: float, value: float, enter: float, leave: float) -> bool:
        """`now` in seconds, from any origin."""
        otherwise = value < leave if self.on else value >= enter
        if not otherwise:
            self._since = None
        else:
            self._since = now if self._since is None else self._since
            if now - self._since >= (self._leave_s if self.on else self._enter_s):
                self.on, self._since = not self.on, None
        return self.on


class GivesWay:
    """`look` takes a sample; `uplink` and `device` say whether others use these now."""

    def __init__(self) -> None:
        self._up, self._gpu, self._cpu = Hysteresis(), Hysteresis(), Hysteresis()
        self.seen = OthersUse()
        """the last sample"""

    def look(self, now: float, seen: OthersUse, uplink_rate: float = 0.0) -> None:
        """`uplink_rate`: bytes a second that the uplink is known to carry; 0 where that is not known."""
        self.seen = seen
        enter = max(UP_LEAST, UP_SHARE * uplink_rate)
        self._up.look(now, seen.up or 0.0, enter, STILL * enter)
        self._gpu.look(now, seen.gpu or 0.0, DEVICE_SHARE, STILL * DEVICE_SHARE)
        self._cpu.look(now, seen.cpu or 0.0, DEVICE_SHARE, STILL * DEVICE_SHARE)

    @property
    def uplink(self) -> bool:
        return self._up.on

    @property
    def device(self) -> str:
        """Which device others use: "GPU", "processor"; "" for none."""
        return "GPU" if self._gpu.on else "processor" if self._cpu.on else ""
