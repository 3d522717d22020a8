"""Who was dropped for what it sent: kept away for longer each time, and forgotten in the end."""

from __future__ import annotations

from p2p.membership.banlist import MAX_SHUNNED, SHUN_S, Banlist


def test_longer_each_time_up_to_a_limit() -> None:
    shunned, now, terms = Banlist(), 1000.0, []
    for _ in range(10):
        assert not shunned.holds("p", now) and not shunned.holds("q", now)
        shunned.add("p", now)
        start = now
        while shunned.holds("p", now):
            now += 10
        terms.append(now - start)
    assert terms[:3] == [SHUN_S[0], 2 * SHUN_S[0], 4 * SHUN_S[0]] and terms[-1] == SHUN_S[1] == max(terms)


def test_no_more_are_remembered_than_matter() -> None:
    """New identities cost nothing: one dropped every second for a day."""
    shunned = Banlist()
    for second in range(86_400):
        shunned.add(str(second), float(second))
        assert shunned.holds(str(second), float(second)) and len(shunned) <= MAX_SHUNNED
    assert shunned.holds(str(second - 10), float(second))
