"""The pool as the head runs it: what nodes cost and make, which generate, what a step cost. Pure; told the time.

Joins capacity model, rates, activation and bill (the rooms beside this) from what a head sees of its nodes and its trainer. Must
not know the network, the ledger or how a node is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, inf
from statistics import median
from typing import Any

from learner.economy.activation import Activation
from learner.economy.allocation import Advice, more_nodes
from learner.economy.bill import Bill
from learner.economy.candidates import Candidate, Decision, Rules
from learner.economy.demand import Demand, choose_kappa, required, slack, stall
from learner.economy.price_keys import price_of
from learner.economy.priced_nodes import FREE, PricedNode, Seen
from learner.economy.rates import Estimate, NodeRates
from p2p.protocol.prices import Activate, State, Terms

KEPT_STEPS = 7
"""Latest steps whose times and tokens are kept; medians of them count, so that an evaluation now and then does not."""

DECIDE_S = 1.0
"""Least seconds between two decisions."""

KEPT_CHANGES = 20
"""Latest changes that the status page shows."""


@dataclass
class Pool:
    """`prices`: "peer:ID" or "ticket:PATTERN" -> what such nodes cost, whatever they say; a node's own name counts for nothing,
    for it chose that. `publish_every` 0: as the capacity model says.

    A node that costs nothing always generates; only what the others must still make is decided. `spent_before`: by earlier
    lives of the run. """

    rules: Rules
    staleness: int
    publish_every: int = 0
    prices: Mapping[str, Sequence[float]] = field(default_factory=dict)
    learner_usd_per_hour: float = 0.0
    spent_before: float = 0.0
    most_usd_per_hour: float = inf
    """that a node may ask for itself"""
    most_usd_per_gb: float = inf
    """the same for 10^9 bytes that leave it"""
    generation_s: float = field(default=0.0, init=False)
    """that a group takes when nothing is in its way (`learner.rollouts.durations`); the caller keeps it up to date"""
    bill: Bill = field(default_factory=Bill, init=False)
    decision: Decision | None = field(default=None, init=False)
    changes: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_CHANGES), init=False)
    _nodes: dict[str, PricedNode] = field(default_factory=dict, init=False)
    _rates: NodeRates = field(default_factory=NodeRates, init=False)
    _activation: Activation = field(init=False)
    _received: int = field(default=0, init=False)
    """bytes that nodes say they got from other nodes"""
    _decided: float | None = field(default=None, init=False)
    _began: float | None = field(default=None, init=False)
    """the learner's step under way"""
    _waited: float = field(default=0.0, init=False)
    _tokens: int = field(default=0, init=False)
    _steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS), init=False)
    """(seconds of work, tokens trained on)"""
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS), init=False)
    _costs: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS), init=False)
    """(dollars, tokens) of the last steps"""
    _step: int = field(default=0, init=False)
    _learner_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._activation = Activation(self.rules)

    # ---- nodes

    def joined(self, peer: str, name: str, now: float, *, ticket: str = "", usd_per_hour: float | None = None) -> None:
        """It says what it costs right after. `ticket`: the name of the one by which it came; `usd_per_hour`: what that says."""
        given = price_of(self.prices, peer, ticket) or ([usd_per_hour] if usd_per_hour is not None else None)
        assigned = Terms(*map(float, given)) if given is not None else None
        self._nodes[peer] = m = PricedNode(name, sampled=now, joined=now, assigned=assigned)
        m.terms, m.hired = assigned or FREE, assigned is not None
        if assigned is None:
            self.bill.hold_back(peer, now)
        self._account(peer, m, now)

    def offered(self, peer: str, terms: Terms, now: float) -> Activate | None:
        """What it says it costs; what to tell it, if anything: what costs something takes versions and waits to be chosen. It is
        a stranger's word, and money: who asks for too much is not used, what was said first stands as long as the link does,
        nothing is owed before the node is proven, and waiting costs only what work came to before; one that asks for nothing an
        hour asks for nothing."""
        m = self._nodes[peer]
        if m.offered:
            return None
        m.offered = True
        dear, sends_dear = terms.usd_per_hour > self.most_usd_per_hour, terms.usd_per_gb > self.most_usd_per_gb
        if m.assigned is None and (dear or sends_dear):
            m.state = "asleep"
            m.why = _too_dear(f"${terms.usd_per_hour:,.2f}/h", self.most_usd_per_hour, "most_usd_per_hour") if dear else (
                _too_dear(f"${terms.usd_per_gb:,.2f} a GB", self.most_usd_per_gb, "most_usd_per_gb")
            )  # fmt: skip
            self.changes.append(f"step {self._step}: {m.name} asleep: {m.why}")
            return Activate(m.state, m.why)
        m.terms = m.assigned or (terms if terms.usd_per_hour else FREE)
        told = None
        if m.costs:
            m.state, m.why = "warm", "just joined"
            told = Activate(m.state, m.why)
        self._account(peer, m, now)
        return told

    def received(self, peer: str, from_peers: int) -> None:
        """A node says that it got so many bytes of a version from other nodes: they are who is paid for it, so its word must
        count."""
        m = self._nodes.get(peer)
        if m is not None and self.bill.owes(peer):
            self._received += from_peers
            m.received += from_peers

    def left(self, peer: str, now: float) -> None:
        if self._nodes.pop(peer, None) is not None:
            self.bill.left(peer, now)

    def accepted(self, peer: str, tokens: int) -> None:
        """So many of a node's tokens were accepted."""
        m = self._nodes.get(peer)
        if m is not None and tokens:
            m.accepted += tokens

    def installed(self, peer: str, seconds: float, now: float) -> None:
        """A version reached it so long after it was begun. What was begun before the node was ready does not count: what a joiner
        takes to catch up is another matter."""
        m = self._nodes.get(peer)
        if m is not None and m.ready and now - seconds >= m.ready_at:
            m.spreads.append(seconds)

    @property
    def priced(self) -> bool:
        """Whether any node costs something."""
        return any(m.costs for m in self._nodes.values())

    @property
    def known(self) -> bool:
        """Whether all active nodes have worked long enough to be known: until then they seem to make too little."""
        return all(self._rates.estimate(p).known for p, m in self._nodes.items() if m.state == "active" and m.ready)

    def active(self, peer: str) -> bool:
        """Whether a node is to be given work."""
        m = self._nodes.get(peer)
        return m is not None and m.state == "active"

    def sleeps(self, peer: str) -> bool:
        m = self._nodes.get(peer)
        return m is not None and m.state == "asleep"

    # ---- the learner

    def waited(self, seconds: float, tokens: int) -> None:
        """The trainer waited so long for groups with so many tokens."""
        self._waited += seconds
        self._tokens += tokens

    def stepped(self, step: int, now: float) -> None:
        """`step` steps are done; or the first is about to begin."""
        if self._began is not None and step > self._step:
            took = now - self._began
            self._steps.append((max(took - self._waited, 1e-6), self._tokens))
            self._waits.append(min(self._waited, took))
            self._learner_s += took
            cost = self.bill.step(now) + took / 3600 * self.learner_usd_per_hour
            self._costs.append((cost, self._tokens))
        self._began, self._waited, self._tokens, self._step = now, 0.0, 0, step

    @property
    def demand(self) -> Demand | None:
        """What the learner takes; None before its first step."""
        if not self._steps:
            return None
        work, tokens = median(s for s, _ in self._steps), median(t for _, t in self._steps)
        return Demand(tokens, work, self.staleness, self.kappa, self.generation_s)

    @property
    def enough(self) -> bool:
        """Whether those that generate meet the capacity rule; False before it is known what a step takes."""
        demand = self.demand
        return demand is not None and self._supply() >= required(demand, self.spread(self._working()))

    @property
    def kappa(self) -> int:
        """Steps between two versions."""
        if self.publish_every or not self._steps:
            return self.publish_every or 1
        work = median(s for s, _ in self._steps)
        return choose_kappa(self.staleness, work, self.spread(self._working()), self.generation_s)

    def _working(self) -> list[str]:
        """Nodes that generate, or are to."""
        return [p for p, m in self._nodes.items() if m.state == "active"]

    def _supply(self) -> float:
        """Tokens per second of those that generate."""
        return sum(self.estimate(p).mean for p in self._working() if self._nodes[p].ready)

    def due(self, step: int, published: int | None) -> bool:
        """Whether a version is to be published after `step` steps, the newest one being of `published`."""
        return published is None or step - published >= self.kappa

    def spread(self, peers: Collection[str]) -> float:
        """Seconds until a version is with all of these."""
        known = {p: median(m.spreads) for p, m in self._nodes.items() if m.spreads}
        usual = max(known.values(), default=0.0)
        return max((known.get(p, usual) for p in peers), default=0.0)

    # ---- deciding

    def tick(self, now: float, seen: Mapping[str, Seen], *, held_back: bool = False) -> list[tuple[str, Activate]]:
        """Look at the nodes; who is to be told what. `held_back`: work was held back, since the learner could not use more."""
        for peer, s in seen.items():
            if peer in self._nodes:
                m = self._nodes[peer]
                if s.proven:
                    self.bill.counts(peer, now)
                self.bill.counted(peer, m.counted(s.sent_bytes, self._received - m.received))
                if sample := m.look(s, now):
                    self._rates.observe(peer, now, *sample)
        if self._decided is not None and now - self._decided < DECIDE_S:
            return []
        self._decided = now
        priced = {p: m for p, m in self._nodes.items() if m.costs}
        if not priced:
            self.decision = None
            return []
        self.decision = decision = self._activation.decide(
            now, self._still_needed(priced), [self._candidate(p, m) for p, m in priced.items()], self.spread,
            self.spent_usd(now), held_back=held_back,
        )  # fmt: skip
        return [(c.peer, self._change(c.peer, c.to, c.why, now)) for c in decision.changes if c.peer in priced]

    def _still_needed(self, priced: Mapping[str, PricedNode]) -> Demand | None:
        """What is left for those that cost something."""
        demand = self.demand
        if demand is None:
            return None
        free = [p for p, m in self._nodes.items() if p not in priced and m.ready and m.state == "active"]
        made = sum(self.estimate(p).lower(self.rules.z) for p in free)
        left = max(demand.tokens - made * demand.train_s, 1e-3)
        return replace(demand, tokens=left)

    def estimate(self, peer: str) -> Estimate:
        """What a node makes, or would if it had all the work that it can take."""
        found, m = self._rates.estimate(peer), self._nodes.get(peer)
        return m.estimate(found) if m is not None else found

    def _candidate(self, peer: str, m: PricedNode) -> Candidate:
        usual = median([o.caught_up_s for o in self._nodes.values() if o.ready] or [0.0])
        waiting = 0.0 if m.ready else max(usual, 1.0)
        return Candidate(
            peer, m.terms.usd_per_hour, self.estimate(peer), state=m.state, ready=m.ready,
            idle_usd_per_hour=m.idle_hourly if self.bill.owes_idle(peer) else 0.0, catch_up_s=waiting,
            own_price=m.assigned is None,
        )  # fmt: skip

    def _change(self, peer: str, to: State, why: str, now: float) -> Activate:
        m = self._nodes[peer]
        m.state, m.why = to, why
        if to == "active":
            m.why_active, m.hired = why, True
        m.busy = False
        self._account(peer, m, now)
        self.changes.append(f"step {self._step}: {m.name} {to}: {why}")
        return Activate(to, why[:200])

    def _account(self, peer: str, m: PricedNode, now: float) -> None:
        t = m.terms
        self.bill.state(
            peer, now, m.state, usd_per_hour=t.usd_per_hour, idle_usd_per_hour=m.idle_hourly, usd_per_gb=t.usd_per_gb
        )

    def advice(self) -> Advice | None:
        """How many more nodes would be worth asking for; None where there is nothing to say: before the first step, while those
        that are there are not known, and where some that are there are kept waiting."""
        demand, nodes = self.demand, [p for p, m in self._nodes.items() if m.ready]
        working = [p for p in nodes if self.active(p)]
        if demand is None or len(working) < len(nodes) or not all(self._rates.estimate(p).known for p in working):
            return None
        supply = sum(self.estimate(p).mean for p in working)
        price = fsum(self._nodes[p].terms.usd_per_hour for p in working) / max(1, len(working))
        room = self.rules.max_usd_per_hour - fsum(m.hourly for m in self._nodes.values())
        return more_nodes(
            demand.tokens / supply if supply > 0 else inf, demand.train_s, len(working), node_usd_per_hour=price,
            learner_usd_per_hour=self.learner_usd_per_hour, most=room // price if price > 0 else inf,
        )  # fmt: skip

    # ---- what it says

    def spent_usd(self, now: float) -> float:
        """By all lives of the run, the learner's own machine included."""
        return self.spent_before + self.bill.spent(now) + self._learner_s / 3600 * self.learner_usd_per_hour

    def describe(self, peer: str, now: float) -> dict[str, Any]:
        """A node's part, for the status page."""
        m = self._nodes.get(peer)
        out: dict[str, Any] = {"usd": self.bill.usd(peer, now)}
        if m is not None:
            e = self.estimate(peer)
            why = self._stands(peer, m) or m.why_active
            out |= {"activity": m.state, "why": m.why, "why_active": why, "usd_per_hour": m.terms.usd_per_hour}
            out |= {"believed_tokens_per_s": e.mean, "believed_sd": e.sd}
        return out

    def _stands(self, peer: str, m: PricedNode) -> str:
        """What an active node is there for now; "" for one that costs nothing, or is not active."""
        d = self.decision
        if d is None or peer not in d.active or not 0 < d.required < inf:
            return ""
        others = max(0.0, d.supply - (self.estimate(peer).lower(self.rules.z) if m.ready else 0.0))
        said = f"the others make {others:,.0f} of {d.required:,.0f} tokens/s"
        if others < d.required:
            return f"needed: {said}"
        return f"for the margin: {said}" if others < (1 + self.rules.release) * d.required else f"to spare, for now: {said}"

    def status(self, now: float) -> dict[str, Any]:
        """Plain values for the status page."""
        demand, d = self.demand, self.decision
        peers, supply = self._working(), self._supply()
        usd, tokens = sum(c for c, _ in self._costs), sum(t for _, t in self._costs)
        out: dict[str, Any] = {
            "nodes": len(self._nodes), "active": len(peers), "supply_tokens_per_s": supply,
            "required_tokens_per_s": demand.tokens / demand.train_s if demand else 0.0, "kappa": self.kappa,
            "spread_s": self.spread(peers), "train_s": demand.train_s if demand else 0.0,
            "usd_per_hour": sum(m.hourly for m in self._nodes.values()) + self.learner_usd_per_hour,
            "spent_usd": self.spent_usd(now), "usd_per_step": usd / len(self._costs) if self._costs else 0.0,
            "usd_per_mtok": 1e6 * usd / tokens if tokens else 0.0,
            "budget_usd": self.rules.budget_usd if self.rules.budget_usd < inf else 0.0,
            "blocked": d.blocked if d else "", "short_by": d.short_by if d else 0.0, "changes": list(self.changes),
        }  # fmt: skip
        advice = self.advice()
        out["advice"] = advice.why if advice is not None and advice.more else ""
        if demand is not None:
            out["slack"] = list(slack(demand, supply, self.spread(peers)).sentences)
        return out

    def metrics(self, now: float) -> dict[str, float]:
        """`cost/*` and `pool/*` of the last step."""
        usd, tokens = self._costs[-1] if self._costs else (0.0, 0)
        demand = self.demand
        out = {
            "cost/usd": usd, "cost/total_usd": self.spent_usd(now), "cost/usd_per_mtok": 1e6 * usd / tokens if tokens else 0.0,
            "pool/generating": float(sum(m.state == "active" and m.ready for m in self._nodes.values())),
        }  # fmt: skip
        if demand is not None:
            peers = self._working()
            supply, spread_s = sum(self.estimate(p).mean for p in peers), self.spread(peers)
            wanted = required(demand, spread_s)
            out |= {
                "pool/required_tokens_per_s": wanted if wanted < inf else demand.tokens / demand.train_s,
                "pool/supply_tokens_per_s": supply, "pool/train_s": demand.train_s, "pool/spread_s": spread_s,
                "pool/generation_s": demand.generation_s, "pool/kappa": float(demand.kappa), "pool/waited_s": self._waits[-1],
                "pool/stall_predicted": stall(demand, supply, spread_s),
            }  # fmt: skip
        return out


def _too_dear(asked: str, most: float, setting: str) -> str:
    return f"asks for {asked}, at most ${most:,.2f} is paid (activation.{setting})"
