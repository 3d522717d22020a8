"""Settings of requests beside training. Must not know nodes."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from learner.requests.port import RequestClass
from learner.section import Section


class RequestsSection(Section):
    """Evaluation on the nodes, and requests through the endpoint: what they may take beside training."""

    evaluation_share: float = Field(default=0.1, ge=0, le=0.5)
    """Share of the nodes' places that evaluation may hold while training wants them, at least one place unless it is 0. A place
    is a sequence that a node decodes at once. When training has had nothing to do for 5 seconds, requests have all places."""
    serving_share: float = Field(default=0.1, ge=0, le=0.5)
    """Share of the nodes' places that requests through the endpoint may hold while training wants them, in the same way."""
    evaluation_waiting: int = Field(default=4096, ge=1, le=65536)
    """Most sequences of evaluation that may wait for a place. More are refused until fewer wait."""
    serving_waiting: int = Field(default=1024, ge=1, le=65536)
    """Most sequences of the endpoint that may wait for a place. More are refused (429) until fewer wait."""
    wait_s: float = Field(default=600.0, ge=1)
    """Seconds that a request may wait for a node without making a token. After that it fails."""
    hold_s: float = Field(default=60.0, ge=0, le=3600)
    """Seconds for which a node may hold a newer version back, so that requests for one exact version end under it. Only as many
    nodes as the class's share says do so, at least one. 0 holds nothing back: such requests fail when their last node goes on."""

    def shares(self) -> Mapping[RequestClass, float]:
        """By class."""
        return {"evaluation": self.evaluation_share, "serving": self.serving_share}

    def most_waiting(self) -> Mapping[RequestClass, int]:
        """By class."""
        return {"evaluation": self.evaluation_waiting, "serving": self.serving_waiting}
