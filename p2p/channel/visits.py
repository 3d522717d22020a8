"""Who comes and goes without end, and which connections a host therefore does not take in. Pure: told times, asked for decisions.

A handshake costs whoever accepts it milliseconds, and a link that comes up costs the others in its swarm a roster each, so a few
dozen who come and go without end hold up everybody. Of a connection nothing is known before its handshake but where it is from.
Must not know sockets or links.
"""

from __future__ import annotations

from ipaddress import IPv6Address

from p2p.ip import plain_ip

SHORT_S = 5.0
"""Seconds. A connection that ends sooner was a short visit."""

SHORT_VISITS, EACH_S = 100, 1.0
"""Short visits that one place may have made at once, and the seconds until it may make one more. Honest nodes make a few: who is
started again and again, or dials several addresses of a host that is slow to answer; and a hundred may share a place."""

SHORT_LINKS, LINK_EACH_S = 5, 10.0
"""The same of one peer's links. One that ends before the seconds of the latter is short: who stays just longer has no more links
by it than who does not."""

HELLOS, HELLO_EACH_S = 20, 1.0
"""The same of hellos that come to no link, over however few connections. An honest peer waits seconds after a refusal."""

A_SECOND, AT_ONCE = 50, 200
"""Connections that are taken in each second from all places together, and beyond that at once. Handshakes of so many take half a
core; a thousand nodes join in 20 s."""

REMEMBERED = 4096
"""Of so many, the last ones, short visits are remembered."""


class ShortVisits:
    """Counts those of each who comes, which end within `short_s`: `most` at once, one more each `each_s`. As many again are
    remembered beyond that: who made as many stays away until all that is over."""

    def __init__(self, most: int, each_s: float, short_s: float = SHORT_S) -> None:
        self._most, self._each_s, self._short_s = float(most), each_s, short_s
        self._rooms: dict[str, tuple[float, float]] = {}  # who -> short visits that it may still make, as of when

    def may_come(self, who: str, now: float) -> bool:
        """Whether it has not made too many."""
        return self._room(who, now) > 0

    def left(self, who: str, came: float, now: float) -> None:
        """It came at `came`, and is gone."""
        if now - came < self._short_s:
            self.change(who, -1, now)

    def change(self, who: str, by: int, now: float) -> None:
        """It has made one visit more or less (`by` -1 or 1)."""
        room = self._room(who, now)
        self._rooms.pop(who, None)  # the last ones stand at the end
        self._rooms[who] = max(-self._most, room + by), now
        if len(self._rooms) > REMEMBERED:
            del self._rooms[next(iter(self._rooms))]

    def __len__(self) -> int:
        return len(self._rooms)

    def _room(self, who: str, now: float) -> float:
        room, at = self._rooms.get(who, (self._most, now))
        return min(self._most, room + (now - at) / self._each_s)


class Visits:
    """Of connections: `may_come` is asked before each handshake, `admitted` told when whoever came has a link, and
    `left` when such a one is over. One that comes to no link counts as a short visit however long it stays, so that no
    place can have many of those at once, nor take all that may come in a second."""

    def __init__(self) -> None:
        self._short = ShortVisits(SHORT_VISITS, EACH_S)
        self._all, self._all_at = float(AT_ONCE), 0.0
        self.turned_away = 0
        """connections that were not taken in"""

    def may_come(self, host: str, now: float) -> bool:
        """Whether a connection from this address is taken in now; it then counts among all places' connections."""
        self._all = min(float(AT_ONCE), self._all + (now - self._all_at) * A_SECOND)
        self._all_at = now
        if self._all < 1 or not self._short.may_come(place_of(host), now):
            self.turned_away += 1
            return False
        self._all -= 1
        self._short.change(place_of(host), -1, now)
        return True

    def admitted(self, host: str, now: float) -> None:
        """Whoever came from this address has a link."""
        self._short.change(place_of(host), 1, now)

    def left(self, host: str, came: float, now: float) -> None:
        """A connection from this address that was taken in at `came`, and was admitted, is over."""
        self._short.left(place_of(host), came, now)


def place_of(host: str) -> str:
    """What one customer of a network has: an IPv4 address, or the first half of an IPv6 one. Other text is itself."""
    try:
        address = plain_ip(host.partition("%")[0])
    except ValueError:
        return host
    return f"{int(address) >> 64:x}::/64" if isinstance(address, IPv6Address) else str(address)
