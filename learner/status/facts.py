"""A run's numbers in words: what the tables of the terminal and of the report have in common. Must not know either of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from learner.status.evaluated import EvalPoint
from learner.status.run_state import NodeRow, RunState
from learner.status.words import DASH, counted, dollars, joined, milliseconds, number, share, short_peer
from p2p.quantities import human_bytes, human_seconds


class Fact(NamedTuple):
    """A name and what is said under it."""

    name: str
    text: str


def run_facts(state: RunState) -> list[Fact]:
    """The run's numbers. What does not concern this run is left out."""
    facts = (
        Fact("run", f"{state.run} (epoch {state.epoch})" if state.epoch or not state.left else state.run),
        Fact("state", "left" if state.left else f"{'finished' if state.finished else 'running'}, {ran(state)}"),
        Fact("step", how_far(state)),
        Fact("version", version(state)),
        Fact("reward", reward(state)),
        Fact("parts", parts(state)),
        Fact("episodes", episodes(state)),
        Fact("held out", held_out(state)),
        *evaluation_facts(state),
        Fact("evaluating", evaluating(state)),
        Fact("staleness", staleness(state)),
        Fact("pace", speed(state)),
        Fact("trajectories", trajectories(state)),
        Fact("unscored", unscored(state)),
        Fact("audits", audits(state)),
        Fact("caught", caught(state)),
        Fact("cut", cut_short(state)),
        Fact("capacity", capacity(state)),
        Fact("local engine", local_engine(state)),
        Fact("endpoint", endpoint(state)),
        Fact("spent", spent(state)),
        Fact("links", links(state)),
        Fact("turned away", turned_away(state)),
        Fact("weights sent", weights_sent(state)),
        Fact("one version", one_version(state)),
        Fact("limits", state.limits),
        Fact("checkpoint", state.checkpoint),
    )
    return [fact for fact in facts if fact.text]


def turned_away(state: RunState) -> str:
    """Who came too often, or with too many others, to be heard; "" for nobody."""
    return f"{counted(state.turned_away, 'visit')}: too many from one place or in all" if state.turned_away else ""


def ran(state: RunState) -> str:
    """How long its learner runs, or ran; not what lives before took."""
    return human_seconds(state.seconds) + state.in_this_life


def how_far(state: RunState) -> str:
    """Steps that were taken, of those that there are to take where that is known."""
    return f"{state.done} of {state.steps}" if state.steps or not state.left else f"{state.done}"


def version(state: RunState) -> str:
    """The newest, and how many were published in this life; "" where they are not known."""
    return "" if state.left else f"{state.version or DASH}, {state.versions_published} published{state.in_this_life}"


def weights_sent(state: RunState) -> str:
    """Bytes in this life, by who sent them; "" where they are not known."""
    sent = f"{human_bytes(state.learner_egress_bytes)} by the learner, {human_bytes(state.peer_bytes)} between nodes"
    sent += state.in_this_life
    return "" if state.left else sent


def one_version(state: RunState) -> str:
    """Bytes of one; "" where they are not known."""
    size = f"{human_bytes(state.delta_bytes_mean)} as a delta (mean), {human_bytes(state.anchor_bytes)} whole"
    return "" if state.left else size


def reward(state: RunState) -> str:
    """Of the last step's samples."""
    last = state.last
    return "" if last is None else f"{number(last.reward)} mean, exact {number(last.exact)} (step {last.step})"


def held_out(state: RunState) -> str:
    """Exact matches on problems that are never trained on; "" before the first evaluation."""
    if not state.evals:
        return ""
    first, last = state.evals[0], state.evals[-1]
    then = "" if first is last else f", {number(first.held_out, '.2f')} at step {first.step}"
    point = next((p for p in state.evaluated.get("", ()) if p.step == last.step), EvalPoint(last.step))
    return f"exact {number(last.held_out, '.2f')}{error(point.exact_error)} at step {last.step}{then}{doubt(point)}"


def error(value: float | None) -> str:
    """A standard error behind its mean; "" where it is not known."""
    return "" if value is None else f" ± {value:.2f}"


def doubt(point: EvalPoint) -> str:
    """What stands behind a result that does not rest on all of its prompts."""
    share_of = f"{share(point.finished)} of its prompts" if point.finished is not None and point.finished < 1 else ""
    why = f"{point.unscored:.0f} not scored" if point.unscored else "the others were not answered in time" if share_of else ""
    return f" ({joined((share_of, why))})" if share_of or why else ""


def eval_point(point: EvalPoint) -> str:
    """A result in one line, without its step."""
    exact = f"exact {number(point.exact, '.2f')}{error(point.exact_error)}" if point.exact is not None else ""
    reward = f"reward {number(point.reward, '.2f')}{error(point.reward_error)}" if point.reward is not None else ""
    return joined((exact, reward)) + doubt(point)


def evaluation_facts(state: RunState) -> list[Fact]:
    """The evaluations that have a name: what each found last, and at first."""
    facts = []
    for one in state.named_evals:
        first, last = one.points[0], one.points[-1]
        then = f", exact {number(first.exact, '.2f')} at step {first.step}" if first is not last else ""
        facts.append(Fact(f"eval {one.name}", f"{eval_point(last)} at step {last.step}{then}"))
    return facts


def evaluating(state: RunState) -> str:
    """Evaluations under way, and how far they are; "" while there are none, or when the run is over."""
    if state.finished or state.left:
        return ""
    return joined(
        f"{one.name or 'held out'} of version {one.version}: {one.sequences} of {one.of} answers" for one in state.evaluations
    )


def parts(state: RunState) -> str:
    """The parts of the last step's rewards, in the mean; "" where rewards have none."""
    return joined(f"{name} {value:.3g}" for name, value in state.parts.items())


def episodes(state: RunState) -> str:
    """How long the last step's episodes were, and how they ended; "" where there are none."""
    told = state.metrics
    mean, most = told.get("episodes/turns_mean"), told.get("episodes/turns_max")
    if mean is None or most is None:
        return ""
    ends = [(why, told.get(f"episodes/over_{why}")) for why in ("done", "length", "turns", "time")]
    ended = joined(f"{share(value)} {'done' if why == 'done' else f'by {why}'}" for why, value in ends if value)
    errors = told.get("episodes/tool_errors")
    tools = f"{told.get('episodes/tool_calls', 0):.1f} tool calls each, {share(errors)} with errors" if errors is not None else ""
    return joined((f"{mean:.1f} turns (most {most:.0f})", f"ended: {ended}" if ended else "", tools), "; ")


def unscored(state: RunState) -> str:
    """Groups that a reward function cost, and why the newest; "" when there were none."""
    if not state.unscored.groups:
        return ""
    return f"{counted(state.unscored.groups, 'group')}{state.in_this_life}, the last because: {state.unscored.last}"


def audits(state: RunState) -> str:
    """What was scored again of what nodes generate; "" where nothing is."""
    a = state.audits
    if not a.state:
        return ""
    took = f"{human_seconds(a.seconds)} of a processor"
    said = f"{a.checked:,} tokens checked{state.in_this_life}, {a.unchecked:,} not in time, {took}"
    return f"ENDED, {a.why}; {said}" if a.why else said if a.checked or a.waiting else a.state


def caught(state: RunState) -> str:
    """Nodes that were caught cheating; "" when none was."""
    c = state.caught
    if not c.nodes:
        return ""
    made = f"{c.trained_tokens:,} of their tokens were trained on, {counted(c.remade_groups, 'group')} made again"
    return f"{counted(c.nodes, 'node')}{state.in_this_life}; {made}; the last: {c.last}"


def staleness(state: RunState) -> str:
    """Seen (of a run that goes on or ended by itself: in this life) and allowed; "" where the bound is not known."""
    if state.left and not state.max_staleness:
        return ""
    life = "" if state.left else state.in_this_life
    return f"{state.max_staleness_seen} seen{life}, bound {state.max_staleness} (steps)"


def speed(state: RunState) -> str:
    """How fast the recent steps were; "" before the first."""
    if state.step_s is None:
        return ""
    pace = f"{number(state.tokens_per_s, ',.0f')} tokens/s" if state.tokens_per_s is not None else ""
    busy = f"learner busy {share(state.busy)}" if state.busy is not None else ""
    return joined((pace, busy, f"{state.step_s:.3g} s a step"))


def trajectories(state: RunState) -> str:
    """By what became of them; "" where it is not known."""
    if state.left:
        return ""
    t = state.trajectories
    aborted = ", ".join(f"{n} {reason}" for reason, n in t.aborted.items())
    return joined(
        (
            f"{t.consumed} trained on of {t.reserved}", f"{t.outstanding} under way",
            f"aborted: {aborted}" if aborted else "", f"LOST {t.lost}" if t.lost else "",
        )
    )  # fmt: skip


def cut_short(state: RunState) -> str:
    """Sequences that were aborted or truncated because enough others were done; "" when there were none."""
    r = state.redundancy
    if not r.surplus_sequences and not r.truncated:
        return ""
    return (
        f"{r.surplus_sequences} surplus sequences ({r.surplus_groups} surplus groups among them, "
        f"{r.surplus_tokens} tokens), {r.truncated} truncated; "
        f"mean tokens {number(r.cut_mean_length, '.0f')} cut, {number(r.kept_mean_length, '.0f')} kept"
    )


def capacity(state: RunState) -> str:
    """Tokens/s that the learner needs and that active nodes make, and why there are not more nodes; "" while it is not known."""
    pool = state.pool
    if not pool.required_tokens_per_s or not pool.supply_tokens_per_s:  # a node that is not measured yet counts as nothing
        return ""
    text = (
        f"{pool.supply_tokens_per_s:,.0f} tokens/s of {pool.required_tokens_per_s:,.0f} needed, "
        f"{pool.active} of {pool.nodes} nodes active"
    )
    return joined((text, pool.blocked, pool.advice, pool.asked), "; ")


def links(state: RunState) -> str:
    """How many pairs of nodes are linked in which way; "" where there is no pair."""
    kinds: dict[str, int] = {}
    for pair in state.pairs:
        kinds[pair.kind] = kinds.get(pair.kind, 0) + 1
    return joined(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda one: -one[1]))


def pairs_apart(state: RunState, most: int = 10) -> list[str]:
    """A line for each pair of nodes without a link, and why; at most so many, and how many more."""
    found = [f"{p.one} - {p.other}: {p.why or 'nothing was said'}" for p in state.pairs if p.kind == "relayed"]
    return found if len(found) <= most else [*found[:most], f"and {len(found) - most} more"]


def local_engine(state: RunState) -> str:
    """What the learner's local engine does; "" where it has none."""
    own = state.local_engine
    if own is None:
        return ""
    now = "generates" if own.generates else "the trainer's turn" if own.there else "not there"
    last = lambda key: number(own.last.get(f"local_engine/{key}"), ".1f")
    return (
        f"{now}; last step {last('seconds')} s of its own, trainer waited {last('trainer_wait_s')} s, "
        f"nodes {last('remote_wait_s')} s"
    )


def endpoint(state: RunState) -> str:
    """Who samples beside training, and where; "" where there is no endpoint."""
    door = state.endpoint
    if door is None:
        return ""
    return (
        f"{door.url}/v1: {door.now} requests now, {door.answered} answered, {door.refused} refused, {door.left} left by their "
        "clients"
    )


def spent(state: RunState) -> str:
    """Dollars spent so far, and now per hour; "" where nothing costs anything."""
    pool = state.pool
    if not pool.priced:
        return ""
    now = "" if state.finished or state.left else f", now {dollars(pool.usd_per_hour)}/h"
    each = f"; {dollars(pool.usd_per_step)} a step, {dollars(pool.usd_per_mtok)} a million tokens" if pool.usd_per_step else ""
    return f"{dollars(pool.spent_usd)}{now}{each}" + (f" (budget {dollars(pool.budget_usd)})" if pool.budget_usd else "")


def step_line(state: RunState, at: int) -> str:
    """One recent step in one line. KeyError when it is not recent."""
    row = {r.step: r for r in state.recent}[at]
    said = joined(
        (
            f"reward {row.reward:.3f}" if row.reward is not None else "",
            f"exact {number(row.exact, '.2f')}" if row.exact is not None else "",
            f"held out {number(row.held_out, '.2f')}" if row.held_out is not None else "",
            f"staleness {row.staleness:.0f} of {state.max_staleness}" if row.staleness is not None else "",
            f"{number(row.tokens_per_s, ',.0f')} tokens/s" if row.tokens_per_s is not None else "",
            f"learner busy {share(row.busy)}" if row.busy is not None else "",
            counted(state.alive, "node") + (f" ({state.generating} active)" if state.generating != state.alive else ""),
            dollars(row.usd) if row.usd else "",
        )
    )
    return f"step {row.step} of {state.steps}: {said}"


class NodeColumn(NamedTuple):
    """A column of the table of nodes."""

    title: str
    cell: Callable[[NodeRow], str]
    numeric: bool = True
    rank: int = 0
    """where there is little room, those of the highest rank go first; 0 always stays"""


def node_columns(state: RunState) -> list[NodeColumn]:
    """What is shown of each node; prices where there are any."""
    columns = [
        NodeColumn("node", lambda n: n.name, numeric=False),
        NodeColumn("peer", lambda n: short_peer(n.peer), numeric=False, rank=8),
        NodeColumn("state", lambda n: n.state, numeric=False),
        NodeColumn("version", lambda n: n.version if n.version not in ("", "0.0") else DASH, rank=1),
        NodeColumn("tokens", lambda n: f"{n.tokens:,}", rank=6),
        NodeColumn("tok/s", lambda n: f"{n.tokens_per_s:,.0f}" if n.alive else DASH, rank=1),
        NodeColumn("$/h", lambda n: f"{n.usd_per_hour:.3g}", rank=5),
        NodeColumn("$", lambda n: f"{n.usd:.2g}", rank=2),
        NodeColumn("from learner", lambda n: human_bytes(n.bytes_from_learner), rank=4),
        NodeColumn("from nodes", lambda n: human_bytes(n.bytes_from_peers), rank=3),
        NodeColumn("pause", lambda n: milliseconds(n.pause_s), rank=2),
        NodeColumn("digest", lambda n: "ok" if n.digest_ok else DASH, numeric=False, rank=7),
    ]
    return [c for c in columns if state.priced or "$" not in c.title]


def allowed(state: RunState) -> list[str]:
    """What nodes' owners allow them, and why those rest that do; one line for each that is limited."""
    lines = []
    for node in state.nodes:
        why = node.rests if node.alive else node.reason.removeprefix("closed by the peer: ")
        if node.limits or (node.alive and why):
            lines.append(f"{node.name}: {joined(filter(None, (why, node.limits)), '; ')}")
    return lines


def nodes_title(state: RunState) -> str:
    """How many nodes, and what they do; "" where it is not known."""
    if not state.nodes:
        return "" if state.left else "no node yet"
    kinds: dict[str, int] = {}
    for node in state.nodes:
        kinds[node.state] = kinds.get(node.state, 0) + 1
    return f"{counted(len(state.nodes), 'node')}: {joined(f'{count} {kind}' for kind, count in kinds.items())}"
