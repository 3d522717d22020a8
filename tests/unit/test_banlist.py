"""Who was dropped for what it sent: kept away for longer each time, and forgotten in the end."""

from __future__ import annotations

from p2p.membership.banlist import BAN_S, MAX_BANNED, MOST_BANNED, Banlist
from p2p.membership.conduct import MAX_COUNTED, REFUSALS, REFUSALS_S, RefusalCounts


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


def test_so_many_refusals_in_a_minute_expel_and_a_fatal_one_does_at_once() -> None:
    banned = Banlist()
    conduct = RefusalCounts(banned)
    assert not any(conduct.refused("a", "why", 0.0, fatal=False) for _ in range(REFUSALS - 1))
    assert conduct.barred_s("a", 0.0) == 0 and conduct.refused("a", "why", 0.0, fatal=False)
    assert conduct.barred_s("a", 1.0) == BAN_S[0] - 1 and conduct.refused("b", "why", 0.0, fatal=True)
    patient = REFUSALS_S / REFUSALS
    assert not any(conduct.refused("c", "why", i * patient, fatal=False) for i in range(1000))  # they are forgotten as fast


def test_a_peer_that_comes_back_and_back_is_let_in_a_few_times_a_day() -> None:
    """Fatal each time, at once: the first finding was 38 times in 6 s."""
    conduct, comes, now = RefusalCounts(Banlist()), [], 0.0
    while now < 86_400:
        if not conduct.barred_s("p", now):
            comes.append(now)
            assert conduct.refused("p", "no message", now, fatal=True)
            assert conduct.refused("p", "what was on its way", now, fatal=True)  # counts once
        now += 0.5
    assert comes[:4] == [0.0, 30.0, 90.0, 210.0] and len(comes) <= 31


def test_refusals_are_counted_of_so_many_peers_only() -> None:
    conduct = RefusalCounts(Banlist())
    for i in range(3 * MAX_COUNTED):
        conduct.refused(str(i), "why", float(i), fatal=False)
    assert len(conduct) == MAX_COUNTED


def test_so_many_are_remembered_at_all() -> None:
    banned = Banlist()
    for i in range(MOST_BANNED + 100):
        banned.add(str(i), 0.0)
    assert len(banned) == MOST_BANNED
