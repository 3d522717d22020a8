"""What a peer draws by asking, and by coming back: bounded by peer, and enough for one that crashed."""

from __future__ import annotations

from p2p.broadcast.draws import (
    ANSWER_LEAST,
    ANSWERS_BYTES,
    ANSWERS_PER_S,
    MAX_COUNTED,
    PASS_S,
    PASSES,
    PeerDraws,
    ReplyBudget,
)
from p2p.limits import KIB, MIB

CHUNK = 256 * KIB


def test_a_flood_of_questions_gets_a_trickle_of_answers() -> None:
    """The finding: 126 bytes for each that was asked, 32.7 MB in half a minute."""
    budget = ReplyBudget()
    given = sum(1640 * budget.take("p", 1640, i / 600) for i in range(20_000))  # 0.26 MB of questions in 33 s
    assert given <= 1640 * (ANSWERS_BYTES + 34 * ANSWERS_PER_S) / ANSWER_LEAST < 1.4 * MIB
    assert budget.take("q", 1640, 33.0)


def test_a_long_answer_is_given_whole_and_owed() -> None:
    budget = ReplyBudget()
    assert budget.take("p", 16 * MIB, 0.0) and not budget.take("p", 100, 1.0)
    assert not budget.take("p", 100, 47.0) and budget.take("p", 100, 48.5)


def test_peers_that_are_counted_are_bounded() -> None:
    budget, draws = ReplyBudget(), PeerDraws()
    for i in range(MAX_COUNTED + 50):
        budget.take(str(i), 10, 0.0)
        draws.handed(str(i), 10, 10, 0.0)
    assert len(budget) == len(draws) == MAX_COUNTED


def draw(draws: PeerDraws, size: int, rate: float, seconds: float, start: float = 0.0) -> float:
    """Whole states that a peer draws in so long, which takes all that it can have."""
    drawn, now = 0, start
    while now < start + seconds:
        now += CHUNK / rate
        if draws.able(["p"], now):
            draws.handed("p", CHUNK, size, now)
            drawn += CHUNK
    return drawn / size


def test_who_comes_back_and_back_draws_a_few_states() -> None:
    """The finding: 12 whole states in 25 s by 18 links. A transfer's books know nothing of links."""
    assert PASSES <= draw(PeerDraws(), 64 * MIB, 32 * MIB, 25.0) <= PASSES + 25 / PASS_S + 0.1
    assert draw(PeerDraws(), 64 * MIB, 32 * MIB, 600.0) <= PASSES + 600 / PASS_S + 0.1


def test_who_crashed_twice_gets_all_of_it_again_at_once() -> None:
    draws, size = PeerDraws(), 64 * MIB
    for crash in range(3):
        for chunk in range(size // CHUNK):
            assert draws.able(["p", "q"], crash + chunk / 1e3) == ["p", "q"]
            draws.handed("p", CHUNK, size, crash + chunk / 1e3)
    assert draws.able(["p", "q"], 3.0) == ["p", "q"]
    draws.handed("p", 2 * MIB, size, 3.0)
    assert draws.able(["p", "q"], 3.0) == ["q"]
    assert draws.able(["p", "q"], 3.0 + PASS_S / 8) == ["p", "q"]
