"""`shoal bench hostile`: what a third of hostile capacity does to a run's reward, beside runs without."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from netem.bench.hostile.run import HostileRun, hostile_run
from netem.bench.staleness.summary import interval

CASES: Mapping[str, tuple[int, bool]] = {"hostile third": (2, True), "honest nodes alone": (2, False), "all honest": (3, False)}
"""Name -> honest nodes, and whether the cheats come."""


def bench_hostile(
    cases: Sequence[str], seeds: Sequence[int], *, steps: int, settings: Sequence[str], results: Path, folder: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Runs that `results` has are not run again. What `shoal bench hostile --json` prints."""
    known = {(r["case"], r["seed"], r["steps_asked"], tuple(r["settings"])): r for r in read_results(results)}
    rows = list[dict[str, Any]]()
    for seed in seeds:
        for case in cases:
            key = (case, seed, steps, tuple(settings))
            if key not in known:
                honest, hostile = CASES[case]
                run = HostileRun(honest=honest, hostile=hostile, seed=seed, steps=steps, settings=tuple(settings))
                with tempfile.TemporaryDirectory(prefix="shoal-hostile-", dir=folder) as name:
                    found = hostile_run(run, Path(name), say)
                row = {"case": case, "seed": seed, "steps_asked": steps, "settings": list(settings), **found}
                results.parent.mkdir(parents=True, exist_ok=True)
                with open(results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                known[key] = row
                say(f"{case}, seed {seed}: final {row['final_sampled']:.3f}, last tenth {row['reward_last']:.3f}, "
                    f"{row['train_s']:.0f} s of steps, tokens {row['tokens']}, expelled {row['expelled']}")  # fmt: skip
                if never := [name for name in row["identities"] if not row["expelled"].get(name)]:
                    say(f"never expelled: {', '.join(never)}. Either nothing was audited, or they did not cheat")
            rows.append(known[key])
    return summary(rows)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The rows that were kept."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By case: rewards with 95 % intervals over the seeds; of the hostile case what was trained on, by cheat."""
    cases = {}
    for case in dict.fromkeys(r["case"] for r in rows):
        these = [r for r in rows if r["case"] == case]
        final, last = ([r[key] for r in these] for key in ("final_sampled", "reward_last"))
        cases[case] = {
            "seeds": [r["seed"] for r in these],
            "final_sampled": final, "final_sampled_mean": str(interval(final)),
            "final_greedy_mean": str(interval([r["final_greedy"] for r in these])),
            "reward_last": last, "reward_last_mean": str(interval(last)),
            "step_s": fmean(r["train_s"] / max(1, r["steps"] - 1) for r in these),
            "later_step_s": [r.get("later_step_s") for r in these],
            "later_cores": [r.get("later_cores") or {} for r in these],
            "honest_expelled": sum(r["expelled"].get("honest", 0) for r in these),
        }  # fmt: skip
    return {"cases": cases, "cheats": _cheats([r for r in rows if r["identities"]])}


def _cheats(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By cheat, over the hostile runs: its share of all tokens that were trained on, and of each identity that was expelled the
    tokens until then."""
    found = {}
    total = sum(sum(r["tokens"].values()) for r in rows)
    for name in rows[0]["identities"] if rows else ():
        of_each = [r["identities"][name][: r["expelled"].get(name, 0)] for r in rows]
        until = sorted(n for these in of_each for n in these)
        found[name] = {
            "share": sum(r["tokens"].get(name, 0) for r in rows) / total,
            "identities": sum(len(r["identities"][name]) for r in rows),
            "expelled": sum(r["expelled"].get(name, 0) for r in rows),
            "tokens_until_median": until[len(until) // 2] if until else None, "tokens_until_most": until[-1] if until else None,
        }  # fmt: skip
    return found
