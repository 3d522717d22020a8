"""The collector's short way (`extend`): whatever it takes, the long way (`tokens`) would have taken with the same result; and
what the long way refuses, it leaves alone."""

from __future__ import annotations

import random
import struct

import pytest

from learner.rollouts.collector import Collector
from learner.rollouts.event_checks import MIN_LOGPROB
from learner.rollouts.outcomes import Accepted, Requeued, Sampling
from p2p.protocol.rollout import TokenEvent, pack_ids
from p2p.version import Version
from tests.support.groups import open_group

V5, V6, V7 = Version(1, 5), Version(1, 6), Version(1, 7)
STOP, LIMIT, VOCABULARY = 9, 40, 1000


def run(
    request_id: str, start: int, ids: list[int], logprobs: list[float] | None = None, version: Version = V5, finish: str = ""
) -> TokenEvent:
    packed = struct.pack(f"<{len(ids)}f", *(logprobs or [-0.5] * len(ids)))
    return TokenEvent(request_id, start, pack_ids(tuple(ids)), packed, version, finish, "")


def opened() -> Collector:
    collector = Collector(vocab_size=VOCABULARY, failure_budget=10_000)
    for version in (V5, V6):
        collector.published(version)
    open_group(collector, 3, 30, [1, 2], V5, [100, 101], Sampling(LIMIT, (STOP, 8)))
    collector.assign("3.0.0", "a")
    return collector


def state(collector: Collector) -> object:
    """Everything that an event can change."""
    c = collector
    members = [
        (g.group_id, [(m.completion, m.attempt, m.node, m.last_node, m.failures, m.failed_on) for m in g.members])
        for g in c.books.groups.values()
    ]
    held = {node: sorted(names) for node, names in c.books.held.items()}
    return members, c.tokens_by_node, c.failures_by_node, held, c.unwritten._groups  # the whole state of two is compared


def test_a_plain_run_is_taken() -> None:
    collector = opened()
    assert collector.extend("a", run("3.0.0", 0, [1, 2])) == 2
    assert collector.extend("a", run("3.0.0", 2, [3], [-1.5], V6)) == 1
    completion = collector.books.groups[3].members[0].completion  # of a group that is not whole, so nothing hands it out
    assert completion.ids == [1, 2, 3] and completion.logprobs == [-0.5, -0.5, -1.5]
    assert [(s.version, s.start, s.stop) for s in completion.spans] == [(V5, 0, 2), (V6, 2, 3)]
    assert collector.tokens_by_node == {"a": 3} and collector.unwritten.tokens == 3


@pytest.mark.parametrize(
    "odd",
    [
        run("3.0.0", 2, [], []),
        run("3.0.0", 2, [5], finish="stop"),
        run("3.0.0", 2, [5], finish="interrupt"),
        run("3.0.0", 1, [5]),
        run("3.0.0", 3, [5]),
        run("3.0.1", 2, [5]),
        run("3.1.0", 0, [5]),
        run("x", 2, [5]),
        run("3.0.0", 2, [5], version=V7),
        run("3.0.0", 2, [5], version=Version(1, 4)),
        run("3.0.0", 2, [STOP]),
        run("3.0.0", 2, [8, 5]),
        run("3.0.0", 2, [VOCABULARY]),
        run("3.0.0", 2, [1 << 31]),
        run("3.0.0", 2, [5], [float("nan")]),
        run("3.0.0", 2, [5, 5], [-1.0, float("nan")]),
        run("3.0.0", 2, [5, 5], [float("nan"), -1.0]),
        run("3.0.0", 2, [5], [float("-inf")]),
        run("3.0.0", 2, [5, 6], [float("inf"), float("-inf")]),
        run("3.0.0", 2, [5], [0.5]),
        run("3.0.0", 2, [5], [MIN_LOGPROB - 1]),
        run("3.0.0", 2, [5] * (LIMIT - 2)),
        run("3.0.0", 2, [5] * LIMIT),
        TokenEvent("3.0.0", 2, b"\1\0\0\0\2\0", b"\0" * 6, V5, "", ""),
        TokenEvent("3.0.0", 2, b"\1\0\0\0", b"\0" * 8, V5, "", ""),
    ],
)
def test_what_is_not_plain_is_left_alone(odd: TokenEvent) -> None:
    collector, twin = opened(), opened()
    for each in (collector, twin):
        assert each.extend("a", run("3.0.0", 0, [1, 2])) == 2
    assert collector.extend("a", odd) == 0
    assert state(collector) == state(twin)


def test_nobody_but_its_holder_extends_a_sequence() -> None:
    collector = opened()
    assert collector.extend("thief", run("3.0.0", 0, [1])) == 0
    collector.node_lost("a")
    assert collector.extend("a", run("3.0.0", 0, [1])) == 0
    collector.assign("3.0.1", "b")
    assert collector.extend("a", run("3.0.1", 0, [1])) == 0 and collector.extend("b", run("3.0.1", 0, [1])) == 1
    collector.abort_group(3)
    assert collector.extend("b", run("3.0.1", 1, [1])) == 0 and not any(collector.books.held.values())  # memory of what is over


@pytest.mark.parametrize("seed", range(40))
def test_both_ways_come_to_the_same(seed: int) -> None:
    """Two collectors hear the same; one takes the short way where it may, the other always the long one."""
    rng = random.Random(seed)
    short, long = opened(), opened()
    taken = 0
    for _ in range(300):
        held = short.working("a")
        if not held:
            for request in short.pending():
                short.assign(request.request_id, "a")
                long.assign(request.request_id, "a")
            held = short.working("a")
            if not held:
                break
        name = rng.choice(held)
        stands = len(short.books.held["a"][name].member.completion.ids)  # where the sequence stands
        ids = [rng.choice([1, 2, 3, 3, 3, 4, 5, 6, 7, STOP, VOCABULARY]) if rng.random() < 0.1 else rng.randrange(1, 8)
               for _ in range(rng.randint(0, 4))]  # fmt: skip
        logprobs = [rng.choice([-0.1, -2.0, -59.0, float("nan"), 0.5]) if rng.random() < 0.02 else -rng.random() for _ in ids]
        start = stands + (rng.choice([-1, 1]) if stands and rng.random() < 0.03 else 0)
        version = rng.choices([V5, V6, V7], [20, 4, 0.2])[0]
        finish = rng.choices(["", "stop", "length", "interrupt"], [40, 1, 1, 1])[0]
        message = run(name, start, ids, logprobs, version, finish)
        quick = short.extend("a", message)
        outcome = long.tokens("a", message)
        if quick:
            taken += 1
            assert outcome == Accepted(name, quick)
        else:
            assert repr(short.tokens("a", message)) == repr(outcome)
        if isinstance(outcome, Requeued) and rng.random() < 0.5:
            assert short.node_lost("a") == long.node_lost("a")
        assert repr(state(short)) == repr(state(long))
    assert taken > 10
    assert short.unwritten.take() == long.unwritten.take()
