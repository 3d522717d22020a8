"""The table [standing] of a run's configuration."""

from __future__ import annotations

from pydantic import Field

from learner.section import Section
from learner.standing.standing import StandingRules


class StandingSection(Section):
    """What a node must have done before it is relied on. A stranger begins with two sequences, and each one that it ends as asked
    lets it hold one more, a long one several."""

    proven_tokens: int = Field(default=4096, ge=0)
    """Tokens of completions that a node ended as asked, after which it counts as proven."""
    unproven_share: float = Field(default=0.25, ge=0, le=1)
    """Share of the sequences, both of those that nodes hold and of those that ended lately, that nodes which are not proven may
    have together. It bounds what strangers can do, however many they are."""
    trusted: list[str] = Field(default_factory=list)
    """Peer ids of nodes that you answer for: they are proven from the start. ["*"] trusts every node: for a closed network."""

    def rules(self, own: frozenset[str] = frozenset()) -> StandingRules:
        """`own`: peers of the learner's own, which are trusted too."""
        return StandingRules(
            proven_tokens=self.proven_tokens, unproven_share=self.unproven_share, trusted=frozenset(self.trusted) | own
        )
