"""`shoal bench chaos`: what kills cost, beside a run that nothing disturbs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from netem.bench.chaos.account import differing
from netem.bench.chaos.run import Chaos, ChaosSettings, model_for
from p2p.errors import UsageError


def bench_chaos(settings: ChaosSettings, compare: bool, folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench chaos --json` prints; with `compare`, completions beside those of a second, undisturbed run."""
    if compare and settings.beside:
        raise UsageError("--compare goes without --beside: what a kill takes back is drawn again with other seeds")
    root = Path(tempfile.mkdtemp(prefix="shoal-chaos-", dir=folder))
    try:
        model = model_for(settings.task, root / "model")
        chaos = Chaos(root / "run", model, settings, say)
        result: dict[str, Any] = {"settings": asdict(settings)} | asdict(chaos.go())
        if compare:
            calm = replace(settings, node_kills=0, learner_kills=0, engine_kills=0, engine=(), frozen=True)
            quiet = Chaos(root / "quiet", model, calm, say)
            quiet.go()
            ours, others = chaos.books.trajectories, quiet.books.trajectories
            both = set(ours) & set(others)
            result["compared"] = len(both)
            result["compared_tokens"] = sum(len(others[k].completion_ids) for k in both)
            result["differing"] = differing(ours, others)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    result["ok"] = not result["lost"] and not result.get("differing") and result["regenerated_max"] <= 32
    return result


def describe(result: dict[str, Any]) -> str:
    """A few lines for people."""
    r, took = result, ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in result["journal_s"].items())
    engines = r["engine_kills"]
    lines = [
        f"killed: {r['node_kills']} nodes, the learner {len(r['learner_kills'])} times ({', '.join(r['learner_kills']) or '-'}); "
        f"{r['seconds']:.0f} s",
        f"groups: {r['consumed']} consumed, each once; {r['lost']} lost, aborted {r['aborted'] or 'none'}",
        f"tokens: {r['accepted']:,} accepted, {r['resumed_tokens']:,} of unfinished groups resumed, {r['regenerated']} made "
        f"again (at most {r['regenerated_max']} of one sequence), {r['in_flight']} under way when a learner died, "
        f"{r['orphaned']} of versions that a kill took back, in groups that went on",
        f"from making to journal: {took or '-'}",
    ]
    if r["episodes"]:
        lines.append(
            f"episodes: {r['episodes']:,} of {r['turns']:,} turns, each as the game plays it; {r['mid_episode']} in their midst "
            f"when a learner died, {r['moved']} went from node to node"
        )
    if engines:
        down, relayed = sorted(e["down_s"] for e in engines), sum(e["relayed"] for e in engines)
        lines.append(
            f"engines killed: {len(engines)}, back after {down[0]:.1f} to {down[-1]:.1f} s; meanwhile their nodes passed "
            f"{relayed:,} chunks on"
        )
    if "compared" in r:
        lines.append(f"beside an undisturbed run: {r['compared']:,} completions, {len(r['differing'])} differ")
    return "\n".join(lines)
