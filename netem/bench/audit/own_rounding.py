"""What a run has that trusts nobody: the auditor's own rounding, measured on answers of its own to the bench's prompts.

Must not know how tokens are judged, or engines.
"""

from __future__ import annotations

from itertools import count

from learner.audit.calibration import Calibration
from learner.audit.claims import OwnGroup
from learner.audit.own_completions import SampledBy
from learner.audit.plan import OWN_AT_ONCE, OWN_KIND
from learner.audit.repeats import SeenTokens
from learner.audit.self_calibration import measure_bfloat16
from netem.bench.audit.world import MEMBERS, STRANGE_EVERY, World

FROM, GROUPS = 700_000_000, 16
"""Number of its first group, whose prompts no node answers, and how many it answers at once."""


def own_rounding(world: World) -> Calibration:
    """Strange prompts are left out: what nobody expected is judged by what was."""
    calibration, model, seen = Calibration(), world.checker(), SeenTokens()
    sampled = SampledBy(stop_ids=world.stop, longest=world.most)
    usual = (i for i in count(FROM) if world.name != "tiny" or i % STRANGE_EVERY != 1)
    while calibration.wants_own(OWN_KIND):
        numbers = [next(usual) for _ in range(GROUPS)]
        groups = [OwnGroup(world.prompt(i), tuple(world.seed_of(i, member) for member in range(MEMBERS))) for i in numbers]
        own = measure_bfloat16(model, groups, OWN_AT_ONCE, sampled, seen=seen)
        calibration.add(OWN_KIND, *own.found, repeated=own.repeated, prompts=own.prompts, own=True)
    return calibration
