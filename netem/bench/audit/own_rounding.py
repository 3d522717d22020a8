"""What a run has that trusts nobody: the auditor's own rounding, measured at places of the answers that the bench made.

Must not know how tokens are judged, or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from learner.audit.calibration import Calibration, NodeArithmetic
from learner.audit.plan import OWN_AT_ONCE, OWN_KIND
from learner.audit.repeats import SeenTokens
from learner.audit.scorer import score
from learner.audit.self_calibration import SampledBy, measure_bfloat16
from netem.bench.audit.making import HONEST, stream_of
from netem.bench.audit.nodes import MEMBERS
from netem.bench.audit.store import claims_of
from netem.bench.audit.world import STRANGE_EVERY, World


def own_rounding(world: World, kinds: Sequence[NodeArithmetic]) -> Calibration:
    """At places of honest nodes of all these kinds, a batch of each in turn. Answers to strange prompts are left out: what nobody
    expected is judged by what was."""
    calibration, model, seen = Calibration(), world.checker(), SeenTokens()
    streams = [stream_of(world, kind, HONEST).batches() for kind in kinds]
    for path in (path for turn in zip_longest(*streams) for path in turn if path is not None):
        if not (left := calibration.wants_own(OWN_KIND)):
            break
        first = int(path.stem.split("-")[0])
        claims = [
            claim for i, claim in enumerate(claims_of(path, world))
            if world.name != "tiny" or (first + i // MEMBERS) % STRANGE_EVERY != 1
        ]  # fmt: skip
        sampled, scored = SampledBy(stop_ids=world.stop, longest=world.most), score(model, claims)
        own = measure_bfloat16(model, claims, scored, min(OWN_AT_ONCE, left), sampled, seen=seen)
        calibration.add(OWN_KIND, *own.found, repeated=own.repeated, prompts=own.prompts, own=True)
    return calibration
