"""The pool as the head runs it: prices, who generates, the learner's pace, money. Told the time."""

from __future__ import annotations

import pytest

from learner.config import build_config
from learner.economy.candidates import Rules
from learner.economy.pool import Pool
from learner.economy.price_keys import wrong_price_key
from learner.economy.priced_nodes import Seen
from p2p.errors import UsageError
from p2p.identity import Identity
from p2p.protocol.prices import Terms

QUICK = Rules(dwell_s=10.0, explore_s=10.0)


class World:
    """Nodes that make what they can, of what the learner takes; all in seconds and tokens."""

    def __init__(self, pool: Pool, rates: dict[str, float], prices: dict[str, float], train_s: float, tokens: int) -> None:
        self.pool, self.rates, self.train_s, self.tokens = pool, rates, train_s, tokens
        self.now, self.step, self.stock, self.work = 0.0, 0, 0.0, 0.0
        self.told: dict[str, str] = {}
        pool.stepped(0, 0.0)
        for peer, price in prices.items():
            pool.joined(peer, peer, 0.0)
            order = pool.offered(peer, Terms(price), 0.0)
            self.told[peer] = order.state if order else "active"

    def second(self) -> None:
        self.now += 1.0
        active = [p for p in self.rates if self.told[p] == "active"]
        room = max(0.0, 4 * self.tokens - self.stock)
        able = sum(self.rates[p] for p in active)
        short = able > room
        for peer in active:
            made = self.rates[peer] * min(1.0, room / able)
            self.pool.accepted(peer, round(made))
            self.stock += made
        if self.stock >= self.tokens or self.work:
            self.work += 1.0
            if self.work >= self.train_s:
                self.stock, self.work, self.step = self.stock - self.tokens, 0.0, self.step + 1
                self.pool.waited(0.0, self.tokens)
                self.pool.stepped(self.step, self.now)
        else:
            self.pool.waited(1.0, 0)
        load = 4 if short else 10
        seen = {p: Seen(True, load if p in active else 0, 10, full_rate=self.rates[p]) for p in self.rates}
        for peer, order in self.pool.tick(self.now, seen, held_back=short):
            self.told[peer] = order.state

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()

    def active(self) -> set[str]:
        return {p for p, state in self.told.items() if state == "active"}


def test_nodes_without_a_price_always_generate() -> None:
    pool = Pool(QUICK, 2)
    world = World(pool, {"a": 100.0, "b": 100.0}, {"a": 0.0, "b": 0.0}, 10.0, 500)
    world.run(60)
    assert world.active() == {"a", "b"} and pool.spent_usd(world.now) == 0 and pool.decision is None


def test_what_costs_something_waits_until_it_is_chosen() -> None:
    pool = Pool(QUICK, 2)
    pool.joined("a", "node-a", 0.0)
    order = pool.offered("a", Terms(0.5), 0.0)
    assert order is not None and order.state == "warm" and not pool.active("a")
    [(peer, order)] = pool.tick(1.0, {"a": Seen(True, 0, 8)})
    assert peer == "a" and order.state == "active" and pool.active("a")  # nobody knows yet what a step takes


def test_the_dear_ones_are_let_go_when_the_cheap_are_enough() -> None:
    rates = {"cheap-1": 60.0, "cheap-2": 60.0, "dear-1": 60.0, "dear-2": 60.0}
    prices = {"cheap-1": 0.2, "cheap-2": 0.25, "dear-1": 1.0, "dear-2": 1.2}
    pool = Pool(QUICK, 2)
    world = World(pool, rates, prices, 10.0, 600)  # 60 tokens/s are needed
    world.run(300)
    assert world.active() == {"cheap-1", "cheap-2"}
    before = pool.spent_usd(world.now)
    world.run(360)
    an_hour = (pool.spent_usd(world.now) - before) * 10
    assert 0.45 <= an_hour + 1e-9 <= 0.45 * 1.06  # a twentieth may go to finding out what the others could do
    status = pool.status(world.now)
    assert status["usd_per_hour"] == pytest.approx(0.45) and status["active"] == 2
    assert status["usd_per_step"] == pytest.approx(0.45 / 360, rel=0.1)
    assert any("dear-1 warm: not needed" in line for line in status["changes"])
    assert pool.describe("cheap-1", world.now)["why_active"]


def test_who_leaves_is_replaced_at_once() -> None:
    rates = {"a": 80.0, "b": 80.0, "c": 80.0}
    pool = Pool(QUICK, 2)
    world = World(pool, rates, {"a": 0.2, "b": 0.3, "c": 0.9}, 10.0, 900)
    world.run(300)
    assert world.active() == {"a", "b"}
    del world.rates["a"]
    world.told["a"] = "gone"
    pool.left("a", world.now)
    world.run(3)
    assert world.active() == {"b", "c"}


def test_prices_of_the_config_count_whatever_a_node_says() -> None:
    pool = Pool(QUICK, 2, prices={"ticket:spot-*": [0.3, 0.1], "ticket:*": [2.0], "peer:c": [0.7]})
    usd = {}
    for peer, ticket, printed in (("a", "spot-1", None), ("b", "other", 0.01), ("c", "spot-1", 5.0), ("d", "", None)):
        pool.joined(peer, "spot-1", 0.0, ticket=ticket, usd_per_hour=printed)  # they all took the same name
        pool.offered(peer, Terms(0.0), 0.0)
        usd[peer] = pool.describe(peer, 0.0)["usd_per_hour"]
    assert usd == {"a": 0.3, "b": 2.0, "c": 0.7, "d": 2.0}


def test_a_price_on_the_ticket_counts_where_the_config_has_none() -> None:
    pool = Pool(QUICK, 2, prices={"ticket:spot": [0.3]}, most_usd_per_hour=1.0)
    for peer, ticket, printed, says in (("a", "lab", 3.0, 9.0), ("b", "lab", None, 0.5), ("c", "lab", 0.0, 0.9)):
        pool.joined(peer, peer, 0.0, ticket=ticket, usd_per_hour=printed)
        pool.offered(peer, Terms(says), 0.0)
    assert [pool.describe(peer, 0.0)["usd_per_hour"] for peer in "abc"] == [3.0, 0.5, 0.0]


def test_a_price_goes_by_ticket_or_peer_and_never_by_a_name_that_a_node_chose() -> None:
    peer = Identity.from_seed(bytes(32)).peer_id
    for good in ("ticket:*", "ticket:spot-?", "ticket:a b", f"peer:{peer}"):
        assert wrong_price_key(good) is None
    for bad, told in (("spot-*", '"ticket:spot-*"'), ("*", '"ticket:*"'), ("ticket:", '"ticket:NAME"'), ("", '"peer:PEERID"'),
                      ("peer:*", "12D3KooW"), ("peer:", "12D3KooW"), (f"peer:{peer[:-1]}", "12D3KooW")):
        assert told in (wrong_price_key(bad) or ""), bad
    with pytest.raises(UsageError, match=r"activation.prices: 'spot-\*' names nobody: write \"ticket:spot-\*\""):
        build_config({"run_dir": "r", "model": "m", "activation": {"prices": {"spot-*": [0.3]}}}, "test")


def test_a_spent_budget_stops_what_costs_and_says_so() -> None:
    pool = Pool(Rules(dwell_s=10.0, budget_usd=1.0), 2, spent_before=0.9)
    world = World(pool, {"a": 100.0, "free": 100.0}, {"a": 3600.0, "free": 0.0}, 10.0, 500)
    world.run(10)
    assert world.active() == {"free"}
    assert pool.status(world.now)["blocked"] == "the budget of $1.00, of which $0.10 are left, leaves no room for 1 nodes"


def test_a_version_is_due_every_kappa_steps() -> None:
    pool = Pool(QUICK, 4, publish_every=3)
    assert pool.due(0, None) and not pool.due(2, 0) and pool.due(3, 0)


def test_kappa_follows_how_long_a_version_takes() -> None:
    pool = Pool(QUICK, 6)
    world = World(pool, {"a": 100.0}, {"a": 0.0}, 10.0, 800)
    world.run(50)
    assert pool.kappa == 1
    for _ in range(5):
        pool.installed("a", 25.0, world.now)  # a step takes 10 s
    assert pool.kappa > 2


def test_the_next_life_goes_on_with_the_bill() -> None:
    pool = Pool(QUICK, 2, learner_usd_per_hour=3.6, spent_before=5.0)
    world = World(pool, {"a": 100.0}, {"a": 0.0}, 10.0, 500)
    world.run(100)
    assert 5.0 < pool.spent_usd(world.now) <= 5.1 + 1e-9


def test_a_wild_promise_is_believed_up_to_twice_what_is_delivered() -> None:
    pool = Pool(QUICK, 2)
    pool.joined("a", "a", 0.0)
    pool.offered("a", Terms(1.0), 0.0)
    pool.tick(0.5, {"a": Seen(True, 0, 100)})
    for second in range(1, 90):
        pool.accepted("a", 10)
        pool.tick(float(second), {"a": Seen(True, 20, 100, full_rate=50_000.0)})
    assert 9 < pool.estimate("a").mean <= 20.5
    for second in range(90, 300):  # and once it is full, what it delivers is what it can do
        pool.accepted("a", 12)
        pool.tick(float(second), {"a": Seen(True, 100, 100, full_rate=50_000.0)})
    assert 11 < pool.estimate("a").mean < 13


def test_what_a_stranger_says_it_costs_does_not_empty_the_purse() -> None:
    pool = Pool(Rules(dwell_s=10.0, budget_usd=50.0), 2, most_usd_per_hour=5.0)
    for peer in ("greedy", "waits", "works"):
        pool.joined(peer, peer, 0.0)
    order = pool.offered("greedy", Terms(1e6), 0.0)
    assert order is not None and order.state == "asleep" and "at most $5.00 is paid" in order.why
    pool.offered("waits", Terms(4.0, 4.0), 0.0)
    pool.offered("works", Terms(1.0), 0.0)
    assert pool.offered("works", Terms(5.0, 5.0), 1.0) is None  # it may say so when it joins anew
    assert pool.spent_usd(3600.0) == 0  # nobody was asked to work yet
    nobody = {p: Seen(True, 0, 8, proven=False) for p in ("greedy", "waits", "works")}
    orders = pool.tick(3600.0, nobody)
    assert {peer for peer, order in orders if order.state == "active"} == {"waits", "works"} and not pool.active("greedy")
    for peer in ("waits", "works"):
        pool.accepted(peer, 1)
    pool.tick(7200.0, nobody)
    assert pool.spent_usd(7200.0) == 0  # a token makes nobody's word count
    pool.tick(7200.0, nobody | {"works": Seen(True, 0, 8)})
    assert pool.spent_usd(7200.0) == 0, "nor does what it asks count for the time before"
    assert pool.spent_usd(10800.0) == pytest.approx(1.0)
    pool.left("works", 10800.0)
    pool.joined("works", "works", 14400.0)
    pool.offered("works", Terms(3.0), 14400.0)
    assert pool.spent_usd(18000.0) == pytest.approx(1.0), "what is owed stays; it has to be proven still"


def test_idle_time_costs_what_work_came_to_at_the_most_and_nothing_once_the_budget_is_spent() -> None:
    pool = Pool(Rules(dwell_s=10.0, budget_usd=50.0), 2, prices={"peer:rented": [1.0, 1.0]})
    seen = {p: Seen(True, 0, 8) for p in ("asks", "rented")}
    for peer in seen:
        pool.joined(peer, peer, 0.0)
        pool.offered(peer, Terms(2.0, 99.0), 0.0)
    pool.tick(0.0, seen)
    assert pool.active("asks") and pool.active("rented")
    assert pool.spent_usd(3600.0) == pytest.approx(3.0)
    pool._change("asks", "warm", "not needed", 3600.0)  # what decides has tests of its own
    assert pool.spent_usd(36_000.0) == pytest.approx(2.0 + 2.0 + 10.0), "an hour of work, as much for waiting; the rented one on"
    orders = dict(pool.tick(50 * 3600.0, seen))
    assert pool.spent_usd(50 * 3600.0) > 50 and orders["asks"].state == "asleep" and orders["rented"].state == "warm"
    assert pool.status(50 * 3600.0)["usd_per_hour"] == 1.0 and not pool.tick(50 * 3600.0 + 99, seen)


def test_what_a_node_asks_for_bytes_counts_within_bounds_and_while_it_works() -> None:
    pool = Pool(QUICK, 2, most_usd_per_hour=5.0, most_usd_per_gb=1.0)
    for peer in ("dear", "nothing an hour", "works", "unproven"):
        pool.joined(peer, peer, 0.0)
    order = pool.offered("dear", Terms(0.01, 0.0, 90.0), 0.0)
    assert order is not None and order.state == "asleep" and "asks for $90.00 a GB, at most $1.00 is paid" in order.why
    assert pool.offered("nothing an hour", Terms(0.0, 0.0, 1.0), 0.0) is None
    pool.offered("works", Terms(0.01, 0.0, 1.0), 0.0)

    def seen(sent: int) -> dict[str, Seen]:
        return {p: Seen(True, 0, 8, sent, proven=p != "unproven") for p in ("nothing an hour", "works", "unproven")}

    pool.tick(0.0, seen(0))
    before = pool.spent_usd(0.0)
    pool.received("unproven", 10**12)
    pool.tick(0.0, seen(10**12))
    assert pool.spent_usd(0.0) == before, "nobody whose word counts received it"
    pool.received("nothing an hour", 10**9)
    pool.tick(0.0, seen(10**12))
    assert pool.spent_usd(0.0) - before == pytest.approx(1.0), "the one that works, for what another one got"
    pool._change("works", "asleep", "spent", 0.0)  # what decides has tests of its own
    pool.received("nothing an hour", 10**9)
    pool.tick(0.0, seen(10**12))
    assert pool.spent_usd(0.0) - before == pytest.approx(1.0)


def test_egress_is_what_others_got_whatever_a_node_counts() -> None:
    pool = Pool(QUICK, 2, prices={"ticket:*": [1.0, 0.0, 0.1]})
    for peer in ("a", "b"):
        pool.joined(peer, peer, 0.0)
        pool.offered(peer, Terms(0.0), 0.0)
    seen = lambda sent: {"a": Seen(True, 0, 8, sent), "b": Seen(True, 0, 8)}
    pool.tick(0.0, seen(7_000_000_000))  # of an earlier link
    before = pool.spent_usd(0.0)
    pool.received("b", 2_000_000_000)
    pool.received("a", 9_000_000_000)  # its own word is no proof of what it sent
    for sent in (8_000_000_000, 0, 1 << 53, 0, 1 << 53):
        pool.tick(0.0, seen(sent))
    assert pool.spent_usd(0.0) - before == pytest.approx(0.2)
