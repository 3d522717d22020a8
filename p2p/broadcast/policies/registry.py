"""The policies by name. Above all policies: no policy imports it."""

from __future__ import annotations

from p2p.broadcast.policies.lanes import Lanes
from p2p.broadcast.policies.port import Policy, SessionView
from p2p.broadcast.policies.proven import ProvenSeeding
from p2p.broadcast.policies.relaying import Relaying
from p2p.broadcast.policies.seeding import Seeding
from p2p.broadcast.policies.static import Chain, Star, Tree

DEFAULT = "shoal"
"""Seeding or lanes at the source, relaying at every other peer."""

_STATIC = {"star": Star, "chain": Chain, "tree": Tree}

POLICIES = (DEFAULT, *_STATIC)


def make_policy(name: str, session: SessionView) -> Policy:
    """The policy of that name for this session. ValueError for a name that is none of POLICIES."""
    if name in _STATIC:
        return _STATIC[name](session)
    if name != DEFAULT:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    if session.source is not None:
        return Relaying(session)
    places = session.places
    if places is None:
        return Seeding(session)
    return ProvenSeeding(session) if places.proven_mesh else Lanes(session, places)
