"""Starts the trainer as several processes of this machine, by torchrun's own means, and ends all when one ends badly.

Must not know models or the head. `python -m learner.trainer.ranks.launch RUN_DIR COUNT`; its exit status is that of the rank that
failed first. For several machines start torchrun on each: docs/several-gpus.md.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from p2p.processes import python_command

TRAINER = "learner.trainer.trainer"
"""The module that each rank runs."""

LOOK_S = 0.2
"""Seconds between two looks whether all ranks still run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start them, and wait for their end."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 2 or not args[1].isdigit():
        print("usage: python -m learner.trainer.ranks.launch RUN_DIR COUNT", file=sys.stderr)
        return 2
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What a rank says is what a person is to read, not the table that is made of its end; and other ranks' broken connections.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own, from trainer.threads
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=int(args[1]), run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=LOOK_S,
    )  # fmt: skip
    try:
        program, *arguments = python_command(TRAINER, args[0])
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = int(failure.exitcode)
        if status < 0:
            print(f"trainer: rank {rank} of {args[1]} was killed by {_signal(-status)}; the others were ended", file=sys.stderr)
        return status if status > 0 else 1
    return 0


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    sys.exit(main())
