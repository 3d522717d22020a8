"""Whether an uplink has become faster than is known of it. Pure; one for each `Uplink`.

At a pace that is a tenth above what was delivered a link that doubled is used after four seconds, which is the whole of many
versions. Much more may be tried only where the link shows that it carries more: more and more is delivered, nothing is lost and
no packet waits. Must not know how much is tried then.
"""

from __future__ import annotations

from collections import deque

BEGINS, BEGINS_S = 1.05, 1.0
"""A rise begins once the known rate grew by the first, as a factor, within the second (seconds)."""

GOES_ON, GOES_ON_S = 1.05, 0.3
"""It goes on while the known rate still grows by the first within the second (seconds)."""

CLEAR_S = 0.02
"""Seconds of queueing below which no packet waits, as far as can be told from acknowledgements."""


class Rise:
    """`see` says each time whether the link rises."""

    def __init__(self) -> None:
        self.on = False
        self._rates: deque[tuple[float, float]] = deque()
        """(when, known rate), of the last BEGINS_S and since packets waited"""

    def see(self, now: float, rate: float, queueing: float | None, *, lossy: bool) -> bool:
        """`rate`: bytes/s that the uplink is known to carry now. `queueing`: seconds that packets wait, None where none is under
        way. `lossy`: packets were lost since the last look. Looked at some 20 times a second."""
        rates = self._rates
        if lossy or (queueing is not None and queueing >= CLEAR_S):
            rates.clear()
            self.on = False
            return False
        rates.append((now, rate))
        while now - rates[0][0] > BEGINS_S:
            rates.popleft()
        if not self.on:
            self.on = rate >= BEGINS * rates[0][1]
            return self.on
        then = next((before for at, before in reversed(rates) if now - at >= GOES_ON_S), rates[0][1])
        if rate < GOES_ON * then:
            rates.clear()  # what it rose by until now counts once
            self.on = False
        return self.on
