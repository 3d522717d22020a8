"""A trainer of several processes: it gives what one process gives, resumed with another number of them too; a rank dies."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from learner.config import build_config, dump_toml
from netem.demo.recipes import RECIPES
from netem.demo.tiny_model import build_random_model
from netem.processes.children import Children
from p2p.processes import child_environment, python_command, start, wait_or_kill
from tests.e2e.test_run import steps_done
from tests.support.nightly import NIGHTLY, nightly
from tests.support.watchdog import PATIENCE_S, status_of, until

pytestmark = pytest.mark.e2e

STEPS = 20
APART = 1e-5
"""Most that losses and weights after STEPS steps may be from those of one process, in float32."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_model(tmp_path_factory.mktemp("tiny"), size="0.4m")


KINDS: dict[str, dict[str, Any]] = {
    "full": {}, "lora": {"lora": {"rank": 4}},
    **({"proximal": {"objective": "decoupled", "minibatches": 2}} if NIGHTLY else {}),
}  # fmt: skip


def train(folder: Path, model: Path, count: int, *resumed: int) -> None:
    """`tests.support.ranks_run` in `count` processes."""
    folder.mkdir(exist_ok=True)
    same = {"steps": STEPS, "checkpoint_every": 10, "checkpoint_beside": False}
    kinds = {name: {**same, **settings} for name, settings in KINDS.items()}
    run = ["tests.support.ranks_run", str(folder), str(model), json.dumps(kinds), *map(str, resumed)]
    if count > 1:
        run = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--module", *run]
    log = folder / "said.log"
    process = start(python_command(*run), stdout=log, stderr=log, environment=child_environment({"OMP_NUM_THREADS": "1"}))
    assert wait_or_kill(process, PATIENCE_S) == 0, log.read_text()[-3000:]


def apart(one: Path, other: Path) -> float:
    """The largest difference of weights, and of losses and gradient norms of the steps that both have."""
    a, b = np.load(one / "weights.npz"), np.load(other / "weights.npz")
    assert a.files and set(a.files) == set(b.files)
    weights = max(float(np.abs(a[name].view(np.float32) - b[name].view(np.float32)).max()) for name in a.files)
    logs = [{step: metrics for step, metrics in json.loads((folder / "logs.json").read_text())} for folder in (one, other)]
    both = logs[0].keys() & logs[1].keys()
    assert len(both) >= 10
    return max(weights, *(abs(logs[0][s][key] - logs[1][s][key]) for s in both for key in ("loss/mean", "optim/grad_norm")))


def test_several_processes_train_as_one(tiny: Path, tmp_path: Path) -> None:
    """Two, and four in the nightly run."""
    one, counts = tmp_path / "one", (2, 4) if NIGHTLY else (2,)
    train(one, tiny, 1)
    for count in counts:
        several = tmp_path / str(count)
        train(several, tiny, count)
        for kind in KINDS:
            assert apart(one / kind, several / kind) <= APART
        # As if all had been killed after their checkpoint of step 10: two go on in place of four, and one in place of two.
        train(several, tiny, count // 2, 10)
        for kind in KINDS:
            assert apart(one / kind, several / kind) <= APART


@nightly
def test_a_rank_that_dies_ends_the_epoch_and_another_number_goes_on(shoal: Children, tmp_path: Path, demo_model: Path) -> None:
    run_dir, config = tmp_path / "run", tmp_path / "learner.toml"
    settings = RECIPES["reverse"].config(run_dir, demo_model, 8, 0)
    settings["trainer"] |= {"devices": 2, "device": "cpu"}
    config.write_text(dump_toml(build_config(settings, "test").model_dump()))
    learner = shoal.start("learner", "learner", str(config), "--json")
    until("a ticket", (run_dir / "ticket.txt").exists, shoal)
    node = shoal.start(
        "node", "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(tmp_path / "node"), "--name", "node",
        "--capacity", "96", "--json", "--listen", "/ip4/127.0.0.1/tcp/0",
    )  # fmt: skip
    until("step 2", lambda: steps_done(run_dir) >= 2, shoal)
    below = psutil.Process(learner.pid).children(recursive=True)
    ranks = [p for p in below if "learner.trainer.trainer" in p.cmdline()]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    assert status_of(learner, shoal) == 1
    said = shoal.said("learner")
    assert "was killed by SIGKILL" in said and "--resume" in said and "Traceback" not in said, said
    psutil.wait_procs(below, timeout=PATIENCE_S)
    assert not any(p.is_running() for p in below), "something outlived the learner"

    second = shoal.start("second", "learner", str(config), "--resume", "--json", "--trainer.devices", "3")
    assert status_of(second, shoal) == 0, shoal.said("second")
    assert status_of(node, shoal) == 0
    result = shoal.result("second")
    assert result["step"] == 8 and result["trajectories"]["lost"] == 0
    assert all(n["digest_ok"] and n["version"] == "2.8" for n in result["nodes"])

    export = shoal.start("export", "export", str(run_dir), str(tmp_path / "out"), "--json")
    assert status_of(export, shoal) == 0, shoal.said("export")
    assert (tmp_path / "out" / "model.safetensors").is_file()
