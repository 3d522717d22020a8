"""Paying for just enough: what the learner needs, what nodes are worth, which of them work, what it costs. Pure."""
