"""Where a run's status comes from: its learner's page over HTTP, or the summary it left. Must not know what the values mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from p2p.errors import UsageError

TIMEOUT_S = 5.0
"""Seconds that a head has to answer: the page is built in its own loop, so one that needs longer is stuck or has ended."""


def fetch_status(run_dir: Path) -> dict[str, Any]:
    """The status that the learner of `run_dir` gives now ("finished": False), or the summary it left ("finished": True).

    UsageError, one line, when there is no run, when its learner is not running and left no summary, or when no answer
    comes within TIMEOUT_S.
    """
    import httpx

    run = read_object(run_dir / "run.json").get("run")
    if run is None:
        raise UsageError(f"{run_dir} holds no run")
    port = read_object(run_dir / "status.json").get("port")
    if isinstance(port, int):
        try:
            # Loopback: a proxy from the environment has no business here.
            answer = httpx.get(f"http://127.0.0.1:{port}/status", timeout=TIMEOUT_S, trust_env=False)
            status = answer.json() if answer.status_code == 200 else {}
        except httpx.TimeoutException:
            what = f"the learner of {run_dir} does not answer on port {port} within {TIMEOUT_S:.0f} s"
            raise UsageError(what) from None
        except (httpx.HTTPError, ValueError):
            status = {}
        # Another program, or another run, may have the port by now.
        if isinstance(status, dict) and status.get("run") == run:
            return {**status, "finished": False}
    summary = read_object(run_dir / "summary.json")
    if summary.get("run") == run:
        return {**summary, "finished": True}
    hint = f"go on with: shoal learner {run_dir}/config.toml --resume"
    raise UsageError(f"the learner of {run_dir} is not running ({hint})")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is none. UsageError when it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return values if isinstance(values, dict) else {}
