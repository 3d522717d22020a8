"""A wall clock that jumps by hours, either way: what reads it decides nothing that a jump could spoil.

Wall time is in tickets, memberships, manifests (all with days to spare) and, as a remark, in the journal. Deadlines, stalls,
back-offs and batches of tokens go by the monotonic clock.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.journal.journal import Journal
from learner.journal.records import Piece, ReservedGroup
from learner.trajectory import Group, Trajectory
from p2p.errors import Refusal
from p2p.identity import Identity
from p2p.layout import Layout
from p2p.limits import PROTOCOL_VERSION
from p2p.membership.admission import make_ticket
from p2p.membership.gate import MEMBERSHIP_S, Gate
from p2p.protocol.join import Hello
from p2p.protocol.rollout import Span
from p2p.version import Version
from p2p.weights.manifest import CODEC, Header, ManifestSigner, open_header

HEAD, NODE, OTHER = (Identity.from_seed(bytes([i]) * 32) for i in (1, 2, 3))
NOW, HOUR = 1_800_000_000.0, 3600.0
JUMPS = [-HOUR, HOUR, -20 * HOUR, 20 * HOUR]


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def gate(who: Identity, clock: Clock, membership: bytes = b"") -> Gate:
    made = Gate(who, run="run", head=HEAD.peer_id, wall=clock)
    made.membership = membership
    return made


def hello(membership: bytes, ticket: str = "") -> Hello:
    return Hello(PROTOCOL_VERSION, "run", ticket, membership, (), "node", "test", "")


@pytest.mark.parametrize("jump", JUMPS)
def test_nobody_is_shut_out(jump: float) -> None:
    """Neither by the head nor by another node, with a proof from before the jump or after it."""
    clock, theirs = Clock(), Clock()
    head = gate(HEAD, clock)
    ticket = make_ticket(HEAD, "run", ("/memory/x",)).encode()
    mine = head.admit(NODE.peer_id, hello(b"", ticket), 0.0)
    granted = clock.now
    clock.now += jump
    assert gate(OTHER, clock).check(mine, NODE.peer_id).peer == NODE.peer_id
    assert gate(OTHER, theirs).check(mine, NODE.peer_id).peer == NODE.peer_id
    renewed = head.admit(NODE.peer_id, hello(mine), 0.0)
    assert gate(OTHER, theirs).check(renewed, NODE.peer_id).peer == NODE.peer_id  # the other's clock has not jumped
    # A membership from "the future" is renewed at once, and then no more often than any other.
    assert head.due(granted) == (jump < 0)
    assert not head.due(clock.now)


def test_an_hour_is_noticed_at_the_very_end_of_a_membership_only() -> None:
    clock = Clock()
    proof = gate(HEAD, clock).grant(NODE.peer_id)
    clock.now += MEMBERSHIP_S / 2 + HOUR  # renewed long before
    assert gate(OTHER, clock).check(proof, NODE.peer_id)
    clock.now += MEMBERSHIP_S
    with pytest.raises(Refusal, match="expired"):
        gate(OTHER, clock).check(proof, NODE.peer_id)


@pytest.mark.parametrize("jump", JUMPS)
def test_versions_made_before_a_jump_are_taken_after_it(jump: float) -> None:
    created = int(NOW)
    layout = Layout.build([("w", "float32", (4,))])
    header = Header("run", Version(1, 0), "anchor", None, b"", CODEC, 4096, 1024, created, created + 86400 * 30, layout)
    part = ManifestSigner(HEAD, header).header_part
    manifest = open_header(part, head_key=HEAD.public_key, run="run", min_epoch=0, now=NOW + jump)
    assert manifest.version == Version(1, 0)


def test_the_journal_goes_by_steps_and_epochs_and_never_by_its_times(tmp_path: Path) -> None:
    """Five lives, the clock an hour back or forth in the midst of each, against the same lives on a steady clock."""

    def lives(folder: Path, jumps: list[float]) -> tuple[object, ...]:
        clock, seen = Clock(), list[object]()
        for life, jump in enumerate(jumps):
            with Journal.open(folder / "journal.sqlite", "run", clock=clock) as journal:
                epoch, last = journal.new_epoch(), journal.last_commit()
                step = last.step if last else 0
                version = Version(epoch, step)
                ids = [journal.next_group_id() for _ in range(2)]
                journal.record_reserved([ReservedGroup(g, journal.next_task_index(), version, 1) for g in ids])
                journal.record_node("peer", "n", 1, 1)
                clock.now += jump
                journal.record_tokens([Piece(g, 0, 0, version, bytes(8), bytes(8), "peer") for g in ids])
                t = Trajectory(
                    prompt_ids=(1,), completion_ids=(0, 0), logprobs=(0.0, 0.0), spans=(Span(version, 0, 2),),
                    reward=1.0, finish="stop", node="peer", seed=7,
                )
                journal.record_finished(Group(ids[0], life, (t,)))
                journal.record_node("peer", "n", 1, 1)
                journal.commit(step + 1, f"c{step + 1}", ids[:1])
                seen += [journal.epochs(), journal.counts(), journal.unfinished(), journal.unconsumed(), journal.tasks_to_retry()]
                seen += [(c.step, c.epoch, c.checkpoint) for c in [journal.last_commit()] if c is not None]
                assert journal.counts().groups.lost == 0
        return tuple(seen)

    for name in ("steady", "jumping"):
        (tmp_path / name).mkdir()
    assert lives(tmp_path / "steady", [0.0] * 5) == lives(tmp_path / "jumping", [-HOUR, 2 * HOUR, -2 * HOUR, HOUR, -HOUR])
