"""A node whose hours end in mid-generation, real processes: no token is lost, it rests, and it comes back when it may."""

from __future__ import annotations

import json
import time

import pytest

from netem.processes.children import Children
from tests.e2e.test_drain import model, nodes, run_dir, tokens
from tests.support.nightly import nightly
from tests.support.watchdog import status_of, until

pytestmark = pytest.mark.e2e
__all__ = ["model", "run_dir"]

LEAST_S = 5.0
"""Seconds that a node has at the least, from when it is told its hours to their end, so that it hears of them before."""


def until_next_minute(least_s: float) -> str:
    """The clock's next full minute that is at least so many seconds away."""
    return time.strftime("%H:%M", time.localtime(60 * (int((time.time() + least_s) // 60) + 1)))


@nightly
def test_hours_that_end_in_mid_generation_cost_no_token(shoal: Children, run_dir, capsys: pytest.CaptureFixture[str]) -> None:
    import shoal as cli

    folder = str(shoal.folder / "one")
    node = shoal.start(
        "one", "node", "--join", str(run_dir / "ticket.txt"), "--dir", folder, "--name", "one", "--capacity", "16", "--listen",
        "/ip4/127.0.0.1/tcp/0", "--json",
    )  # fmt: skip
    until("it generates", lambda: tokens(run_dir, "one") > 20, shoal)
    # Not by its flags: how long a busy machine takes until it generates is not known.
    started, ends = time.strftime("%H:%M", time.localtime(time.time() - 3600)), until_next_minute(LEAST_S)
    assert cli.main(["node", "limit", "--dir", folder, "--between", f"{started}-{ends}"]) == 0
    assert f"{started}-{ends}" in capsys.readouterr().out
    until("the learner knows", lambda: nodes(run_dir)["one"]["limits"] == f"{started}-{ends}", shoal)
    assert nodes(run_dir)["one"]["alive"], "its hours are not over yet"
    until("its hours end", lambda: not nodes(run_dir)["one"]["alive"], shoal)
    row, said = nodes(run_dir)["one"], shoal.said("one")
    assert f"out of hours until {started} (its clock)" in row["reason"]
    assert "sequences go back" in said and "not handed over" not in said
    assert "; 0 sequences go elsewhere" in shoal.said("learner"), "nothing was left to be found out when its link went down"
    assert node.poll() is None, "it rests, and stays"
    handed = row["tokens"]

    assert cli.main(["node", "limit", "--dir", folder, "--between", "always", "--max-up-mbit", "50"]) == 0
    assert "up 50 Mbit/s" in capsys.readouterr().out
    until("it is back", lambda: nodes(run_dir)["one"]["alive"] and tokens(run_dir, "one") > 0, shoal)
    assert nodes(run_dir)["one"]["limits"] == "up 50 Mbit/s"
    assert cli.main(["node", "drain", "--dir", folder]) == 0
    assert status_of(node, shoal) == 0, shoal.said("one")
    until("it is gone", lambda: not nodes(run_dir)["one"]["alive"], shoal)
    result = shoal.result("one")
    assert result["made"] == result["tokens"] == handed + nodes(run_dir)["one"]["tokens"]
    assert "refused" not in shoal.said("learner")
    assert json.loads((shoal.folder / "one" / "limits.json").read_text())["max_up_mbit"] == 50
