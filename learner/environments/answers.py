"""What an environment's answer means, for whoever asked: whether it can be used, and how the episode came to its end. Pure; must
not know groups or evaluations."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Literal

from learner.environments.port import TurnAnswer
from learner.tasks.port import Score


def episode_finish(score: Score, over: str) -> Literal["stop", "length"]:
    """How an episode with this score came to its end: "length" only where no tokens were left for it. `over` is the limit that
    its environment was told of. How its last turn ended says nothing: a turn may have a limit of its own, and the environment may
    answer it."""
    return "length" if ((score.end and score.end.over) or over) == "length" else "stop"


def unusable(answer: TurnAnswer, stop_ids: Container[int], vocab_size: int | None) -> str:
    """Why the episode cannot go on with this answer; "" when it can. `vocab_size` None: not known."""
    if answer.failed:
        return answer.failed
    if answer.anew:
        return ""
    if answer.score is not None:
        return "" if math.isfinite(answer.score.reward) else f"its environment's reward is {answer.score.reward}"
    if not answer.given:
        return "its environment answered with nothing: neither tokens nor a score"
    outside = next((t for t in answer.given if not 0 <= t < (vocab_size or 1 << 31)), None)
    if outside is not None:
        return f"its environment answered with token id {outside}, outside the vocabulary"
    if answer.given[-1] in stop_ids:  # a node would take the next turn for ended before it began
        return f"its environment's answer ends with the stop token {answer.given[-1]}, so no turn can follow"
    return ""
