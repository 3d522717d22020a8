"""`shoal bench rollouts`: policies beside each other on the same simulated fleets and prompts, and ours with strategies
switched off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.table import Table

from learner.dispatch.dispatcher import Strategies
from netem.rollout_sim.fleet import KINDS, QWEN3_8B, Seat, fleet, preemptible
from netem.rollout_sim.other_systems import Buffer, OneStepOff, Quota, Synchronous
from netem.rollout_sim.ours import Shoal
from netem.rollout_sim.sim import Outcome, RolloutPolicy, RolloutSimulation, SimSettings
from netem.rollout_sim.staleflow import StaleFlow
from netem.rollout_sim.workload import EVEN, SKEWED, Workload
from p2p.errors import UsageError

AMPLE = fleet({"H100-SXM": 10, "A100-80G": 14, "L40S": 16, "RTX4090": 8})
TIGHT = fleet({"H100-SXM": 8, "A100-80G": 10, "L40S": 16, "RTX4090": 8})
SCARCE = fleet({"H100-SXM": 6, "A100-80G": 9, "L40S": 14, "RTX4090": 7})


@dataclass(frozen=True, slots=True)
class WorkloadCase:
    """A workload on a fleet."""

    name: str
    workload: Workload
    seats: Sequence[Seat]
    what: str

    @property
    def capacity(self) -> float:
        """Tokens per second that the fleet makes with its memory full, over what a learner that never waits trains on."""
        need = self.workload.mean_length() * self.workload.groups * self.workload.samples
        # What a running sequence holds, in the mean over its life and weighted with how long that is.
        lengths = [n for i in range(500) for n in self.workload.group(i, 0)[1]]
        held = self.workload.prompt + sum(n * n for n in lengths) / sum(lengths) / 2
        made = 0.0
        for seat in self.seats:
            room, model = seat.kind.context(QWEN3_8B), seat.kind.throughput(QWEN3_8B)
            share = sum(min(b, 3600.0) - min(a, 3600.0) for a, b in seat.there) / 3600.0
            made += share * model.rate(room / held, room)
        return made / (need / (self.workload.train_s + self.workload.update_s))


def cases(seed: int) -> dict[str, WorkloadCase]:
    spot = preemptible(
        AMPLE, mean_up_s=900.0, mean_down_s=150.0, horizon_s=48 * 3600.0, seed=seed, steady=["H100-SXM"]
    )
    found = (
        WorkloadCase("skewed", SKEWED, AMPLE, "a long tail, up to 20,000 tokens; a fleet with capacity to spare"),
        WorkloadCase("tight", SKEWED, TIGHT, "the same with little to spare"),
        WorkloadCase("scarce", SKEWED, SCARCE, "the same with hardly anything to spare"),
        WorkloadCase("even", EVEN, AMPLE, "completions of about the same length"),
        WorkloadCase("spot", SKEWED, spot, "long tail; all but the H100s come and go, 15 minutes there and 2.5 away in the mean"),
    )
    return {case.name: case for case in found}


POLICIES: dict[str, Callable[[], RolloutPolicy]] = {
    "synchronous": Synchronous, "one-step-off": OneStepOff, "areal-quota": Quota, "roll-buffer": Buffer,
    "staleflow": StaleFlow, "shoal": Shoal,
}  # fmt: skip

ABLATIONS: dict[str, Callable[[], RolloutPolicy]] = {
    "no migration": lambda: Shoal(Strategies(migration=False), label="no migration"),
    "nobody gives way": lambda: Shoal(Strategies(give_way=False), label="nobody gives way"),
    "emptiest node": lambda: Shoal(Strategies(gain=False), label="emptiest node"),
    "fastest node": lambda: Shoal(Strategies(pace=True), label="fastest node"),
    "not longest first": lambda: Shoal(Strategies(longest_first=False), label="not longest first"),
    "no streaming": lambda: Shoal(streaming=False, label="no streaming"),
    "no migration on loss": lambda: Shoal(migration=False, label="no migration on loss"),
}

ABLATED = ("scarce", "spot")
"""Where strategies matter: with capacity to spare and nobody lost, any will do."""


def run_one(case: str, policy: str, settings: SimSettings) -> dict[str, Any]:
    """One simulation: a row of the benchmark's JSON. For a worker process, hence names."""
    make = POLICIES.get(policy) or ABLATIONS[policy]
    found = cases(settings.seed)[case]
    outcome: Outcome = RolloutSimulation(found.seats, found.workload, make(), settings).run()
    kept = 1 - outcome.lost / outcome.held if outcome.held else None
    return {
        "throughput": outcome.tokens_per_s, "idle": outcome.idle, **asdict(outcome), "policy": policy, "kept_on_loss": kept
    }  # fmt: skip


def bench_rollouts(
    names: Sequence[str], policies: Sequence[str], settings: SimSettings, ablate: bool, jobs: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """What `shoal bench rollouts --json` prints. UsageError for unknown names."""
    known = cases(settings.seed)
    for name in names:
        if name not in known:
            raise UsageError(f"--workloads: no workload {name!r}: {', '.join(known)}")
    for name in policies:
        if name not in POLICIES:
            raise UsageError(f"--policies: no policy {name!r}: {', '.join(POLICIES)}")
    if settings.steps - settings.warm < 1:
        raise UsageError(f"--steps {settings.steps}: the first {settings.warm} are not counted")
    work = [(case, policy) for case in names for policy in policies]
    if ablate:
        work += [(case, label) for case in names if case in ABLATED for label in ABLATIONS]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        pending = {pool.submit(run_one, case, policy, settings): (case, policy) for case, policy in work}
        for done in as_completed(pending):
            case, policy = pending[done]
            rows[case, policy] = row = done.result()
            say(f"{case}: {policy}: {row['learner_bound']:.3f} of the learner's bound, staleness {row['staleness_max']}")
    workloads = [
        {
            "name": name, "what": known[name].what, "capacity": known[name].capacity, "model": QWEN3_8B.name,
            "fleet": {kind: sum(s.kind.name == kind for s in known[name].seats) for kind in KINDS},
            **{k: v for k, v in asdict(known[name].workload).items() if k != "name"},
            "rows": [rows[name, policy] for policy in policies],
        }
        for name in names
    ]  # fmt: skip
    ablations = [
        {"name": label, "workload": case, **rows[case, label], "against": rows[case, "shoal"]["throughput"]}
        for case in names for label in ABLATIONS
        if (case, label) in rows and (case, "shoal") in rows
    ]
    bound = settings.staleness
    stale = [f"{case}: {policy}" for (case, policy), row in rows.items() if row["staleness_max"] > bound]
    ours = [where for where in stale if where.split(": ")[1] not in POLICIES or where.endswith(": shoal")]
    return {
        "ok": not ours, "settings": asdict(settings), "workloads": workloads, "ablations": ablations, "beyond_the_bound": stale
    }  # fmt: skip


def print_rollouts(result: dict[str, Any]) -> None:
    """Tables on stderr."""
    console = Console(stderr=True)
    for workload in result["workloads"]:
        table = _table(f"{workload['name']}: {workload['what']} (capacity {workload['capacity']:.2f} of the need)")
        for row in workload["rows"]:
            _add(table, row["policy"], row)
        console.print(table)
    if result["ablations"]:
        table = _table("shoal without")
        for row in result["ablations"]:
            _add(table, f"{row['name']} ({row['workload']}: {row['throughput'] / row['against']:.3f} of the whole)", row)
        console.print(table)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    heads = ("policy", "tokens/s", "of the bound", "idle", "staleness", "mean", "made", "lost", "moved", "aborted", "length")
    for head in heads:
        table.add_column(head, justify="left" if head == "policy" else "right")
    return table


def _add(table: Table, name: str, row: dict[str, Any]) -> None:
    lost = "-" if row["kept_on_loss"] is None else f"{1 - row['kept_on_loss']:.4f}"
    table.add_row(
        name, f"{row['throughput']:,.0f}", f"{row['learner_bound']:.3f}", f"{row['idle']:.3f}", str(row["staleness_max"]),
        f"{row['staleness_mean']:.2f}", f"{row['made']:.2f}", lost, str(row["moved"]), str(row["aborted"]),
        f"{row['mean_length']:,.0f}",
    )  # fmt: skip
