"""What contest and players say to each other, what a round's events amount to, and shardcast's trees."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import trio.testing
from blake3 import blake3
from msgspec.structs import replace
from pydantic import TypeAdapter

from netem.contest.contest import Round
from netem.contest.players import PEERS, is_ours, peer_argv
from netem.contest.players.events import (
    AskAccount,
    Command,
    EndPlayer,
    Expect,
    Links,
    Prepare,
    Publish,
    Role,
    TurnRogue,
    command_line,
    parse_command,
)
from netem.contest.players.rogue import Conduct, RogueChannel
from netem.networks.profile import Profile, build_profile
from p2p.channel.port import BULK
from p2p.errors import ChannelClosed, UsageError
from p2p.protocol.messages import decode
from p2p.protocol.versions import Chunk, Have
from p2p.protocol.wire import encode
from tests.support.memory_network import MemorySwitch

HOSTS = {"learner": "10.77.0.1", "node-1": "10.77.0.2", "node-2": "10.77.0.3"}
TREE = {"node-1": ["learner"], "node-2": ["node-1"]}
NODE = Role("node", "node-1", HOSTS["node-1"], "/nowhere", HOSTS, "learner", {"upstream": TREE})

COMMANDS = [
    Links(), Prepare(0, 1 << 20, 7), Expect(3, "ab", 5, {"torrent": "xyz"}), Expect(3, "ab", 5, {}), Publish(1), AskAccount(2),
    TurnRogue("corrupt"), TurnRogue("withhold"), EndPlayer(),
]  # fmt: skip


# --- the wire ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_come_back(command: Command) -> None:
    line = command_line(command)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert parse_command(line) == command


@pytest.mark.parametrize(
    "line",
    ["", "x", "[]", "{}", '{"do":"sing"}', '{"do":"publish"}', '{"do":"publish","round":"0"}', '{"do":"stop","now":true}',
     '{"do":"turn"}', '{"do":"turn","to":"dust"}', '{"do":"expect","round":0}',
     '{"do":"prepare","round":0,"bytes":1.5,"seed":0}'],
)  # fmt: skip
def test_what_is_no_command(line: str) -> None:
    with pytest.raises(UsageError, match="no command"):
        parse_command(line)


def test_roles_come_back_and_must_fit() -> None:
    assert Role.parse(NODE.text()) == NODE
    assert NODE.nodes == ["node-1", "node-2"]
    for wrong in (replace(NODE, role="source"), replace(NODE, name="node-9"), replace(NODE, source="nobody")):
        with pytest.raises(UsageError, match="role: "):
            Role.parse(wrong.text())
    with pytest.raises(UsageError, match="role: Object contains unknown field `colour`"):
        Role.parse(json.dumps({**json.loads(NODE.text()), "colour": "red"}))


PLAYER = """
import sys
from blake3 import blake3
from netem.contest.players.events import Player, RoundTraffic, serve
class Both(Player):
    "A source and a node in one: verifies what it prepared."
    def __init__(self, role): self.ready = None; print("a library says hello")
    def prepare(self, command, payload, digest): self.payload = payload; return {"extra": [1]}
    def expect(self, command):
        if command.extra != {"extra": [1]}: raise ValueError("lost")
    def publish(self, round): self.ready = blake3(self.payload).hexdigest()
    def poll(self): ready, self.ready = self.ready, None; return ready
    def traffic(self): return RoundTraffic(1, 2, 3)
    def close(self): print('a library says goodbye')
sys.exit(serve(sys.argv, Both))
"""


def played(commands: list[bytes]) -> Iterator[Any]:
    """Events of PLAYER; each command is written once the one before was answered, and the end of stdin comes last."""
    argv = [sys.executable, "-c", PLAYER, NODE.text()]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        for command in commands:
            yield json.loads(process.stdout.readline())
            process.stdin.write(command)
            process.stdin.flush()
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
        yield process.wait(30)


def test_a_player_is_served() -> None:
    commands = [Links(), Prepare(4, 1000, 9), Expect(4, "", 1000, {"extra": [1]}), Publish(4), AskAccount(4), EndPlayer()]
    *events, status = played([command_line(c) for c in commands])
    assert status == 0
    kinds = [e["event"] for e in events]
    assert kinds == ["ready", "linked", "prepared", "expecting", "published", "verified", "account"]
    prepared, published, verified, account = events[2], *events[4:]
    assert prepared["extra"] == [1] and verified["digest"] == prepared["digest"] and len(prepared["digest"]) == 64
    assert verified["at"] >= published["at"] > 0
    assert {e["round"] for e in events[2:]} == {4}
    assert (account["sent"], account["received"], account["duplicates"]) == (1, 2, 3) and account["cpu_s"] >= 0


def test_a_player_ends_with_its_stdin() -> None:
    assert list(played([])) == [{"event": "ready"}, 0]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"do":"sing"}\n', "no command"),
        (command_line(Expect(0, "", 1, {})), "lost"),
        (command_line(TurnRogue("corrupt")), "cannot be turned"),
    ],
)
def test_a_player_that_fails_says_why(line: bytes, why: str) -> None:
    *_, failed, status = played([line])
    assert failed["event"] == "failed" and why in failed["why"] and status == 1


# --- a round -------------------------------------------------------------------------------------------------------------

DIGEST = blake3(b"payload").hexdigest()


def event(kind: str, **values: Any) -> dict[str, Any]:
    return {"event": kind, "round": 2, **values}


def verified(at: float, digest: str = DIGEST) -> dict[str, Any]:
    return event("verified", at=at, digest=digest)


def account(sent: int, duplicates: int, cpu_s: float) -> dict[str, Any]:
    return event("account", sent=sent, received=0, duplicates=duplicates, cpu_s=cpu_s)


def test_who_was_named_by_whom() -> None:
    state = new_round()
    wrong = ["c", "chunk does not hash"]
    state.take("a", {**account(1, 0, 0.0), "reports": [wrong, wrong], "banned": ["c"]})
    state.take("b", {**account(1, 0, 0.0), "reports": [["d", "?"]], "banned": []})
    state.take("learner", {**account(1, 0, 0.0), "reports": [wrong], "banned": []})
    result = state.result()
    assert result.named == {"c": ("a",), "d": ("b",)} and result.banned == {"c": ("a",)} and result.reported == ("c",)


def test_whence_it_came() -> None:
    state = new_round()
    state.take("a", {**account(1, 0, 0.0), "whence": {"learner": 5, "b": 7}})
    state.take("b", account(1, 0, 0.0))  # a peer that does not say
    assert state.result().whence == {"a": {"learner": 5, "b": 7}}


CHUNK, HAVE = encode(Chunk(b"m" * 32, 7, 1, b"bytes")), encode(Have(b"m" * 32, (1, 2)))


def test_a_rogue_tampers_with_chunks_only() -> None:
    conduct = Conduct()
    assert conduct.out(CHUNK) == CHUNK and conduct.out(HAVE) == HAVE
    conduct.now = "corrupt"
    sent = conduct.out(CHUNK)
    assert sent is not None and conduct.out(HAVE) == HAVE
    assert decode(sent) == msgspec.structs.replace(decode(CHUNK), data=bytes([ord("b") ^ 1]) + b"ytes")
    conduct.now = "withhold"
    assert conduct.out(CHUNK) is None and conduct.out(HAVE) == HAVE


async def test_a_rogues_channel_passes_on_the_rest(autojump_clock: trio.testing.MockClock) -> None:
    switch = MemorySwitch(latency=0.01)
    async with switch.network("alice") as alice, switch.network("bob") as bob:
        inner = await alice.open("bob", bob.addresses, BULK)
        theirs, conduct = await bob.incoming.receive(), Conduct()
        mine = RogueChannel(inner, conduct)
        assert (mine.peer, mine.kind, mine.path()) == ("bob", BULK, inner.path())
        await mine.send(CHUNK)
        assert await theirs.receive() == CHUNK
        conduct.now = "withhold"
        await mine.send(CHUNK)
        assert mine.try_send(CHUNK) and mine.try_send(HAVE)
        assert await theirs.receive() == HAVE
        await theirs.send(HAVE)
        assert await mine.receive() == HAVE
        await mine.aclose("over")
        with pytest.raises(ChannelClosed):
            await theirs.receive()


def new_round() -> Round:
    return Round(2, ["a", "b"], "learner", DIGEST)


def test_a_round_that_goes_well() -> None:
    state = new_round()
    state.take("a", verified(101.5))  # a node may be heard before the source
    state.take("learner", event("published", at=100.0))
    assert not state.whole
    state.take("b", verified(103.0))
    assert state.whole and not state.accounted
    for host, sent, duplicates in (("learner", 70, 0), ("a", 30, 4), ("b", 10, 5)):
        state.take(host, account(sent, duplicates, 0.5))
    assert state.accounted
    result = state.result(late_s=0.001, dropped=3, congestion="cubic")
    assert result.verified == {"a": 1.5, "b": 3.0} and result.seconds == 3.0 and result.published_at == 100.0
    assert (result.source_bytes, result.duplicate_bytes, result.cpu_s) == (70, 9, 1.5)
    assert not result.cut_off and result.failures == () and result.dropped == 3


def test_a_round_that_is_cut_off() -> None:
    state = new_round()
    state.take("learner", event("published", at=100.0))
    state.take("a", verified(101.0))
    result = state.result()
    assert result.cut_off and result.verified == {"a": 1.0} and math.isinf(result.seconds)


def test_a_round_that_never_began() -> None:
    state = new_round()
    state.take("a", verified(101.0))
    result = state.result()
    assert result.cut_off and result.verified == {} and math.isnan(result.published_at)


@pytest.mark.parametrize(
    ("said", "why"),
    [({"event": "failed", "why": "no disk"}, "a: no disk"), (None, "a: it ended"), (verified(101.0, "00" * 32), "a: verified 0")],
)
def test_a_round_that_fails(said: dict[str, Any] | None, why: str) -> None:
    state = new_round()
    state.take("learner", event("published", at=100.0))
    state.take("a", said)
    assert state.whole and state.accounted
    result = state.result()
    assert result.failures[0].startswith(why) and not result.cut_off and math.isinf(result.seconds)


def test_the_first_reason_stays() -> None:
    state = new_round()
    state.take("a", {"event": "failed", "why": "no disk"})
    state.take("a", None)
    assert state.failures == ["a: no disk"]


def test_other_rounds_and_wrong_hosts_do_not_count() -> None:
    state = new_round()
    state.take("learner", event("published", at=100.0))
    state.take("learner", verified(100.0))
    state.take("a", {**verified(101.0), "round": 1})
    state.take("b", event("published", at=1.0))
    state.take("b", verified(102.0))
    assert not state.whole
    assert state.result().verified == {"b": 2.0}


# --- the rest ------------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for peer in PEERS:
        if is_ours(peer):
            continue
        with pytest.raises(UsageError, match=rf"^{peer} is not installed: pip install 'shoal\[peers\]'$"):
            peer_argv(peer)
    with pytest.raises(UsageError, match="no peer 'carrier pigeon'"):
        peer_argv("carrier pigeon")


def test_a_profile_travels_to_the_switch() -> None:
    traced = {"name": "x", "up_mbit": 1.0, "down_mbit": 2.0, "trace": [[0.0, 1.0, 2.0]]}
    values = {
        "congestion": "reno", "mtu": 9000, "sites": {"home": {"preset": "lan"}}, "learner": {"preset": "us-wan"},
        "nodes": [{"count": 2, "preset": "lte", "site": "home"}, traced],
    }  # fmt: skip
    profile = build_profile(values, "test")
    adapter = TypeAdapter(Profile)
    assert adapter.validate_json(adapter.dump_json(profile)) == profile
