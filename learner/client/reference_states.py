"""States that versions are also told against, for those who hold them: the run's first version, and one some versions back.

The first version is what the run began with: mostly a public base model, which a node may have on its disk. It is kept on the
learner's, from epoch to epoch. Must not know messages, or when what is published.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from p2p.files import write_whole
from p2p.layout import Layout
from p2p.version import Version
from p2p.weights.state import FlatState

log = logging.getLogger("shoal.reference_states")

NAME = "first"
"""Name of the files that keep the run's first version: `first.json` and `first.state`."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A version that was published, its state's digest, and the state."""

    version: Version
    digest: bytes
    state: FlatState


def load_first(folder: Path, layout: Layout) -> Reference | None:
    """The run's first version as an earlier epoch kept it in `folder`; None when there is none of this tensor table, or it is not
    whole any more (a logged reason)."""
    try:
        record = json.loads((folder / f"{NAME}.json").read_text())
        version, digest = Version.parse(record["version"]), bytes.fromhex(record["digest"])
        if record["layout"] != layout.digest.hex():
            raise ValueError("it has another tensor table")
        state = FlatState.open(folder / f"{NAME}.state", layout)
        if state.digest() != digest:
            raise ValueError("its bytes do not match its digest")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the run's first version, kept in %s, is of no use: %s", folder, error)
        return None
    return Reference(version, digest, state)


def keep_first(folder: Path, first: Reference) -> Reference | None:
    """Keep a copy of `first` in `folder`, and return it. A full disk is logged and costs joiners some bytes, nothing else."""
    record = {"version": str(first.version), "digest": first.digest.hex(), "layout": first.state.layout.digest.hex()}
    state = folder / f"{NAME}.state.tmp"
    try:
        copy = FlatState.create(state, first.state.layout, reserve=True)
        for segment in copy.layout.segments():
            copy.populate(segment)
            np.copyto(copy.words(segment), first.state.words(segment))
        copy.flush()
        (folder / f"{NAME}.json").unlink(missing_ok=True)  # of another state: the two are one
        os.replace(state, folder / f"{NAME}.state")
        write_whole(folder / f"{NAME}.json", json.dumps(record))
    except OSError as error:
        state.unlink(missing_ok=True)
        log.warning("cannot keep the run's first version in %s: %s (joiners with the base model gain nothing)", folder, error)
    return load_first(folder, first.state.layout)
