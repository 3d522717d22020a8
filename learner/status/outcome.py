"""What a person sees of a run from its beginning to its end: the ticket, the live view, the summary, the report.

The shell around the views. Must not know the head, trio or torch.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from learner.config import load_config
from learner.run_dir import SAMPLES_FILE, check_idle
from learner.status.evaluated import EvalPoint
from learner.status.facts import audits, caught, doubt, episodes, error, eval_point, ran, spent, unscored
from learner.status.live import OUR_LOGS, STEP_LOG, LiveView, logging_to_file
from learner.status.report import write_report
from learner.status.run_state import RunState
from learner.status.source import fetch_status, read_object
from learner.status.steps import StepHistory, read_metrics, surviving
from learner.status.words import number
from p2p.errors import UsageError

log = logging.getLogger(f"{OUR_LOGS}.run")

WATCH_S = 1.0
"""Seconds between two looks at a learner's status page."""

GONE_S = 30.0
"""Seconds that a watched learner may be silent: one that is started again with --resume is back by then."""


def say_on_stderr(line: str) -> None:
    """Where stdout may be the result's, as with --json."""
    print(line, file=sys.stderr, flush=True)


def say_on_stdout(line: str) -> None:
    """At once, also where stdout is a pipe."""
    print(line, flush=True)


class RunConsole:
    """The console of one run: `hear` is told what happens, `end` the final status."""

    def __init__(self, run_dir: Path, *, page: bool) -> None:
        self._run_dir, self._page = run_dir, page
        self._held = ExitStack()
        self._view: LiveView | None = None
        self._mute = False
        """nobody reads stdout"""

    def __enter__(self) -> RunConsole:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def hear(self, event: str, facts: dict[str, Any]) -> None:
        """`learner.service.Announce`."""
        if event == "ready":
            url = facts.get("endpoint")
            endpoint = f"sample from the policy at {url}/v1, key in {facts['endpoint_key']}\n" if url else ""
            self._tell(
                f"run {facts['run']} in {facts['run_dir']}, status on http://127.0.0.1:{facts['status_port']}/status\n"
                f"{endpoint}nodes join with:\n  SHOAL_TICKET={facts['ticket']} shoal node"
            )
            join = f"shoal node --join-file {self._run_dir / 'ticket.txt'}"
            self._view = LiveView(logging.getLogger(STEP_LOG).info, page=self._page, join=join)
            if self._view.is_page:
                self._held.enter_context(logging_to_file(self._run_dir / "logs" / "learner.log"))
            self._held.enter_context(self._view)
        elif self._view is not None:
            try:
                self._view.update(RunState.of(facts))
            except Exception:  # whatever a view cannot show, the run goes on
                was_page = self._view.is_page
                self._view = None
                self._close()  # first: else nobody sees the log line
                log.exception("the live view ended; see shoal status %s", self._run_dir)
                if was_page:
                    self._view = LiveView(logging.getLogger(STEP_LOG).info, page=False)

    def end(self, status: dict[str, Any]) -> dict[str, Any]:
        """Show the last state, write the report, say what there is and what to do next; the status with the report's path.
        The run itself is whole: what cannot be shown or written is logged."""
        state, view, report = None, self._view, ""
        try:
            state = RunState.of({**status, "finished": True})
            if view is not None:
                view.update(state)
        except Exception:
            self._close()  # first: else nobody sees the log line
            log.exception("the last state cannot be shown")
        self._close()
        if state is None:
            return {**status, "report": ""}
        try:
            report = str(write_report(self._run_dir, state))
        except (UsageError, OSError) as error:
            log.warning("no report: %s", error)
        except Exception:
            log.exception("no report")
        try:
            if self._page:
                self._tell("\n".join(summary_lines(state, self._run_dir, report)))
        except Exception:
            log.exception("no summary")
        return {**status, "report": report}

    def _tell(self, text: str) -> None:
        """To stdout. Where that is closed, the log and `shoal status` are what a person has, and the run goes on."""
        if self._mute:
            return
        try:
            say_on_stdout(text)
        except (OSError, ValueError) as error:
            self._mute = True
            log.warning("stdout cannot be written to: %s; the run goes on, see shoal status %s", error, self._run_dir)

    def _close(self) -> None:
        """End the page, if there is one: log lines go to stderr again."""
        try:
            self._held.close()
        except Exception:  # all of it was let go nevertheless
            log.exception("the page did not end as it should")


def summary_lines(state: RunState, run_dir: Path, report: str) -> list[str]:
    """What came of a run, where it lies, and what to do next."""
    # All lives' steps; the seconds are this life's, and `ran` says so where there were others.
    lines = [f"\nfinished: {state.done} steps{', ' if state.in_this_life else ' in '}{ran(state)}"]
    learned = []
    for name, field in (("reward", "reward"), ("exact", "exact")):
        if (found := state.first_and_last(field)) is not None:
            learned.append(f"{name} {found.first:.3f} -> {found.last:.3f}")
    if learned:
        lines.append(f"  {', '.join(learned)} (means of the first and last tenth)")
    parts = state.part_first_and_last()
    if parts:
        lines.append("  parts: " + ", ".join(f"{name} {ends.first:.3f} -> {ends.last:.3f}" for name, ends in parts.items()))
    if said := episodes(state):
        lines.append(f"  episodes of the last step: {said}")
    if state.evals:
        first, last = state.evals[0], state.evals[-1]
        point = next((p for p in state.evaluated.get("", ()) if p.step == last.step), EvalPoint(last.step))
        then = f"{first.held_out:.2f} at step {first.step} -> " if first is not last else ""
        lines.append(f"  held out {then}{last.held_out:.2f}{error(point.exact_error)} at step {last.step}{doubt(point)}")
    for one in state.named_evals:
        begin, newest = one.points[0], one.points[-1]
        then = f"{number(begin.exact, '.2f')} at step {begin.step} -> " if begin is not newest else ""
        lines.append(f"  evaluation {one.name}: {then}{eval_point(newest)} at step {newest.step}")
    if said := unscored(state):
        lines.append(f"  unscored: {said}")
    if said := caught(state):
        lines.append(f"  caught: {said}")
    if state.audits.why:
        lines.append(f"  audits: {audits(state)}")
    if said := spent(state):
        lines.append(f"  spent {said}")
    lines += [f"  FAULT: {fault}" for fault in state.faults]
    samples = run_dir / SAMPLES_FILE
    for name, where in (
        ("checkpoint", _near(state.checkpoint, run_dir)), ("samples", str(samples) if samples.exists() else ""),
        ("report", report),
        ("next", f"shoal export {run_dir} OUT     # the checkpoint as a Hugging Face folder" if state.checkpoint else ""),
    ):  # fmt: skip
        if where:
            lines.append(f"  {name:<11} {where}")
    return lines


def _near(checkpoint: str, run_dir: Path) -> str:
    """The checkpoint's path as short as the run's."""
    near = run_dir / "checkpoints" / Path(checkpoint).name
    return str(near) if checkpoint and near.exists() else checkpoint


def watch(run_dir: Path, *, page: bool) -> dict[str, Any]:
    """Show the run of `run_dir` until it ends; its last status. UsageError when there is no run, or when its learner is gone."""
    status, join = fetch_status(run_dir), f"shoal node --join-file {run_dir / 'ticket.txt'}"
    with LiveView(say_on_stdout if page else say_on_stderr, page=page, join=join, tell_events=True) as view:
        heard = time.monotonic()
        while True:
            view.update(RunState.of(status))
            if status["finished"]:
                break
            time.sleep(WATCH_S)
            try:
                status, heard = fetch_status(run_dir), time.monotonic()
            except UsageError:
                if time.monotonic() - heard > GONE_S:
                    raise
    if page:
        report = run_dir / "report.html"
        print("\n".join(summary_lines(RunState.of(status), run_dir, str(report) if report.exists() else "")), flush=True)
    return status


def report_of(run_dir: Path) -> Path:
    """Write the report of a run that goes on, has ended, or was left; the page's path. UsageError when there is no run, or when
    its learner is there and does not answer."""
    try:
        status = fetch_status(run_dir)
    except UsageError as error:
        if not (run_dir / "metrics.jsonl").exists():
            raise
        try:
            check_idle(run_dir)
        except UsageError:
            raise error from None
        status = _left_status(run_dir)
    return write_report(run_dir, RunState.of(status))


def _left_status(run_dir: Path) -> dict[str, Any]:
    """What the files of a run whose learner is gone say of it, and nothing else."""
    history = StepHistory(rows := surviving(read_metrics(run_dir / "metrics.jsonl")))
    status = {"run": read_object(run_dir / "run.json").get("run"), "left": True, **history.status()}
    if rows:
        last = rows[-1]
        spent_usd = max((row.usd for row in history.curve if row.usd is not None), default=None)
        status |= {"epoch": last.get("epoch"), "step": last["step"], "metrics": last, "pool": {"spent_usd": spent_usd}}
    try:
        config = load_config(run_dir / "config.toml")
    except UsageError:
        return status
    seen = max((row.staleness for row in history.curve if row.staleness is not None), default=0)
    bound = config.rollout.max_staleness
    return {**status, "steps": config.trainer.steps, "max_staleness": bound, "max_staleness_seen": int(seen)}
