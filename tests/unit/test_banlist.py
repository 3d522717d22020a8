"""Who was dropped for what it sent: kept away for longer each time, and forgotten in the end."""

from __future__ import annotations

from p2p.membership.banlist import BAN_S, MAX_BANNED, Banlist


def test_longer_each_time_up_to_a_limit() -> None:
    banned, now, terms = Banlist(), 1000.0, []
    for _ in range(10):
        assert not banned.holds("p", now) and not banned.holds("q", now)
        banned.add("p", now)
        start = now
        while banned.holds("p", now):
            now += 10
        terms.append(now - start)
    assert terms[:3] == [BAN_S[0], 2 * BAN_S[0], 4 * BAN_S[0]] and terms[-1] == BAN_S[1] == max(terms)


def test_no_more_are_remembered_than_matter() -> None:
    """New identities cost nothing: one dropped every second for a day."""
    banned = Banlist()
    for second in range(86_400):
        banned.add(str(second), float(second))
        assert banned.holds(str(second), float(second)) and len(banned) <= MAX_BANNED
    assert banned.holds(str(second - 10), float(second))
