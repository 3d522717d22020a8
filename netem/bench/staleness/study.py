"""Runs many cases in processes of one thread each, and keeps each result as it comes: a study that was stopped goes on.

Must not know what a run does, nor how results are summed up.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from netem.bench.staleness.cases import Case
from p2p.errors import UsageError

MODELS = "models"
"""Folder of the starts, beside the results."""


def read_results(file: Path) -> list[dict[str, Any]]:
    """What was kept, of a run that was made twice the later; none where there is no file. UsageError for a line that is not one
    of ours: a last one that was cut off counts as never written."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    found = dict[str, dict[str, Any]]()
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            Case(**row["case"])
            found[row["key"]] = row
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{file}, line {number}, is no result of this bench: give another file") from None
    return list(found.values())


def run_study(cases: Sequence[Case], file: Path, processes: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The results of `cases`, of which those in `file` are not run again; the new ones are appended to it one by one. UsageError
    when the file is not one of results."""
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {row["key"]: row for row in read_results(file)}
    _drop_half_line(file)
    missing = [case for case in cases if case.key not in known]
    if not missing:
        return [known[case.key] for case in cases]
    say(f"{len(missing)} of {len(cases)} runs are missing in {file}")
    commit, began = _commit(), time.monotonic()
    with ProcessPoolExecutor(max_workers=processes, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        futures: dict[Future[dict[str, Any]], Case] = {pool.submit(_run, c, file.parent / MODELS): c for c in missing}
        try:
            for count, done in enumerate(as_completed(futures), 1):
                case, result = futures[done], done.result()
                row = {"key": case.key, "case": asdict(case), "commit": commit, "load": os.getloadavg()[0], **result}
                known[case.key] = row
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
                say(f"{count}/{len(missing)} in {time.monotonic() - began:.0f} s: {case.label}, S={case.staleness}, "
                    f"seed {case.seed}: {row['exact'][-1]:.2f}, held out {list(row['held_out'].values())[-1]['all']:.2f}, "
                    f"{row['cpu_s']:.0f} core-seconds")  # fmt: skip
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [known[case.key] for case in cases]


def _one_thread() -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from transformers.utils import logging

    logging.disable_progress_bar()


def _run(case: Case, models: Path) -> dict[str, Any]:
    from netem.bench.staleness.loop import run_case, warm_model

    return run_case(case, warm_model(models, case.task, case.seed))


def _drop_half_line(file: Path) -> None:
    """What a killed study left of its last line."""
    if file.exists():
        data = file.read_bytes()
        if data and not data.endswith(b"\n"):
            with file.open("r+b") as out:
                out.truncate(data.rfind(b"\n") + 1)


def _commit() -> str:
    """Of the source that is run, for the results; "" outside a checkout."""
    where = Path(__file__).parent
    found = subprocess.run(["git", "-C", str(where), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()
