"""Whether this machine reaches the learner of a ticket, by which of its addresses, and whether others can reach this machine.

Each address is dialled by itself, all at once, and answered with a hello; nothing is joined: the learner hears of a stranger who
leaves after the handshake. Judgements are pure. Must not know engines or what is generated.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import trio

from p2p.channel.listening import check_free, short_address
from p2p.channel.port import CONTROL, Network
from p2p.errors import ChannelClosed, Refusal, ShoalError, Unreachable, UsageError
from p2p.findings import OK, WARNING, WRONG, DoctorFinding, FindingState
from p2p.identity import Identity, public_key_of
from p2p.limits import HANDSHAKE_S, PROTOCOL_VERSION
from p2p.membership.admission import Ticket, check_membership
from p2p.membership.gate import MAX_ADDRESSES, VISIT_S, VISITOR
from p2p.membership.peering import JoinRefused, greet
from p2p.printable import printable
from p2p.protocol.join import Hello, Welcome
from p2p.weights.manifest import MAX_CLOCK_SKEW_S

NAME = "shoal doctor"
"""What the learner's log calls whoever only looks."""

CLOCK_S = 60.0
"""Seconds that two clocks may differ before a person is told: tickets and log lines are then hard to compare."""

GIVE_UP_S = 2 * HANDSHAKE_S
"""Seconds for one address: a connection, and the answer to a hello."""

SOUND_ADDRESS = re.compile(r"/ip[46]/[0-9a-fA-F.:]{2,45}/tcp/[0-9]{1,5}")
"""The form of what a learner may say that it sees: the longest IPv6 address has 45 characters, and no zone."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """How one address answered."""

    address: str
    reached: bool
    """whether the learner answered there, be it with a refusal"""
    why: str = ""
    """why not; of one that was reached, why the learner refuses this machine"""
    took_s: float = 0.0
    ahead_s: float | None = None
    """seconds that this machine's clock is ahead of the learner's; None where nothing was said"""
    seen: str = ""
    """this machine's end of the connection, as the learner sees it"""


async def dial(ticket: Ticket, address: str, *, wall: Callable[[], float] = time.time) -> Dialled:
    """Dial one address of the ticket's learner, and show it the ticket."""
    from p2p.channel.libp2p import open_libp2p_network

    me = Identity.generate()
    async with open_libp2p_network(me, []) as network:
        began = trio.current_time()
        try:
            with trio.fail_after(GIVE_UP_S):
                welcome = await _knock(network, ticket, address)
        except JoinRefused as refused:
            return Dialled(address, True, refused.reason, took_s=trio.current_time() - began)
        except Unreachable as error:
            return Dialled(address, False, error.why.removeprefix(f"{short_address(address)}: "))
        except (ChannelClosed, Refusal, ValueError) as error:
            return Dialled(address, False, str(error))
        except trio.TooSlowError:
            return Dialled(address, False, f"no answer in {GIVE_UP_S:.0f} s")
        took_s = trio.current_time() - began
        ahead_s = _ahead(welcome, ticket, me.peer_id, wall())
        return Dialled(address, True, took_s=took_s, ahead_s=ahead_s, seen=sound_address(welcome.seen))


async def _knock(network: Network, ticket: Ticket, address: str) -> Welcome:
    channel = await network.open(ticket.head, [address], CONTROL)
    try:
        return await greet(channel, Hello(
            protocol=PROTOCOL_VERSION, run=ticket.run, ticket=ticket.encode(), membership=b"", addresses=(), name=NAME,
            agent=VISITOR, site="",
        ))  # fmt: skip
    finally:
        await channel.aclose("only looking")


def _ahead(welcome: Welcome, ticket: Ticket, me: str, now: float) -> float | None:
    """The learner dates the membership that it grants by its own clock, and that tells how late it is there."""
    try:
        granted = check_membership(welcome.membership, head_key=public_key_of(ticket.head), run=ticket.run, peer=me, now=0)
    except Refusal:
        return None
    return now - (granted.expires - VISIT_S)


async def dial_all(ticket: Ticket) -> list[Dialled]:
    """Every address of the ticket, in its order, all at once."""
    addresses = ticket.addresses[:MAX_ADDRESSES]
    answers: dict[str, Dialled] = {}

    async def one(address: str) -> None:
        answers[address] = await dial(ticket, address)

    async with trio.open_nursery() as nursery:
        for address in dict.fromkeys(addresses):
            nursery.start_soon(one, address)
    return [answers[address] for address in dict.fromkeys(addresses)]


def judge_dialled(answers: Sequence[Dialled]) -> DoctorFinding:
    """Of the way to the learner."""
    refused = next((a.why for a in answers if a.reached and a.why), "")
    told = [f"{short_address(a.address)} answers in {1000 * a.took_s:.0f} ms" for a in answers if a.reached]
    told += [f"{short_address(a.address)} does not: {printable(a.why)}" for a in answers if not a.reached]
    said = "; ".join(told) or "the ticket names no address"
    if refused:
        todo = "ask whoever runs it for a fresh ticket, or install the release that it runs"
        return DoctorFinding("learner", WRONG, f"it refuses this machine: {printable(refused)} ({said})", todo)
    if any(a.reached for a in answers):
        return DoctorFinding("learner", OK, said)
    return DoctorFinding("learner", WRONG, said, _what_to_do(answers))


def _what_to_do(answers: Sequence[Dialled]) -> str:
    places = [place for a in answers if (place := place_of(a.address)) is not None]
    if any("no peer of ours" in a.why for a in answers):
        return "another program answers there: ask for the right port, or a fresh ticket"
    if places and all(place.is_loopback for place in places):
        return "the ticket is good on the learner's own machine only: let it listen on /ip4/0.0.0.0/tcp/4001"
    if places and not any(place.is_global for place in places):
        return (
            "all addresses are of the learner's local network: from elsewhere its router must forward the port, and "
            "swarm.announce must name its public address"
        )
    if any("refused" in a.why.lower() for a in answers):
        return "nothing listens there: ask whether the learner runs, and whether the ticket is of this run"
    return "ask whether the learner runs, and whether a firewall on its side lets the port through"


def judge_ahead(ahead_s: float) -> DoctorFinding:
    """Of this machine's clock against the learner's. A manifest dated more than MAX_CLOCK_SKEW_S ahead is refused."""
    what, way = "learner's clock", "ahead of" if ahead_s > 0 else "behind"
    if abs(ahead_s) <= CLOCK_S:
        return DoctorFinding(what, OK, f"this machine's differs by {abs(ahead_s):.0f} s")
    said = f"this machine's is {abs(ahead_s):,.0f} s {way} it"
    todo = "set whichever is wrong: timedatectl set-ntp true, or chrony"
    if abs(ahead_s) > MAX_CLOCK_SKEW_S:
        return DoctorFinding(what, WRONG, f"{said}: versions may be refused, as from the future or as expired", todo)
    return DoctorFinding(what, WARNING, said, todo)


def place_of(address: str) -> Any:
    """The IP address in a multiaddr; None where there is none."""
    try:
        return ipaddress.ip_address(address.split("/")[2])
    except (IndexError, ValueError):
        return None


def sound_address(text: str) -> str:
    """`text` where it is the multiaddr of an IP address and a TCP port, and nothing more; "" otherwise. A learner may say
    anything, and what it says is shown and dialled."""
    return text if SOUND_ADDRESS.fullmatch(text) and place_of(text) is not None else ""


def judge_listening(addresses: Sequence[str]) -> DoctorFinding:
    """Of the addresses at which others would dial a node that listens here; it could."""
    places = [place for text in addresses if (place := place_of(text)) is not None]
    said = "others would dial " + ", ".join(map(short_address, addresses))
    if any(place.is_global for place in places):
        return DoctorFinding("port", OK, f"{said}; a firewall may still be in the way")
    if any(not place.is_loopback for place in places):
        todo = (
            "nothing, mostly: nodes behind routers meet each other as the learner arranges it. More certain: --map-port, or "
            "have the router forward the port"
        )
        return DoctorFinding("port", WARNING, f"{said}, on the local network only", todo)
    todo = "listen on /ip4/0.0.0.0/tcp/PORT for others to reach it"
    return DoctorFinding("port", WARNING, f"{said}, from this machine only", todo)


def judge_seen(seen: str, ours: Sequence[str], came_back: FindingState | None) -> DoctorFinding:
    """Of the address from which the learner sees this machine come; `ours` are those of its interfaces. `came_back`: OK when a
    dial to the listening port there came through, WARNING when not, None when nothing listened."""
    place = place_of(seen)
    what = "seen as"
    if place is None:
        return DoctorFinding(what, OK, "it does not say from which address")
    host = str(place)
    if place.is_loopback:
        return DoctorFinding(what, OK, "the learner runs on this machine")
    if host in ours:
        return DoctorFinding(what, OK, f"this machine comes from {host}, its own address: there is no NAT on the way")
    said = f"this machine comes from {host}, which is not its own: it is behind NAT"
    if came_back == OK:
        return DoctorFinding(what, OK, f"{said}, and the port is forwarded")
    if came_back is None:
        return DoctorFinding(what, OK, said, "nothing: other nodes meet this one as the learner arranges it")
    todo = (
        "nothing, mostly: other nodes meet this one as the learner arranges it, unless the router takes another port for each "
        "connection. More certain: --map-port, or have the router forward the port (some let nobody try this from inside)"
    )
    return DoctorFinding(what, WARNING, f"{said}, and the port did not answer there", todo)


def own_hosts() -> list[str]:
    """The addresses of this machine's interfaces."""
    return [a.address.partition("%")[0] for found in psutil.net_if_addrs().values() for a in found]


async def examine_reach(
    listen: Sequence[str], ticket: Ticket | None, *, wall: Callable[[], float] = time.time
) -> list[DoctorFinding]:
    """The findings about ways in and out. Takes half a minute at most, where nothing answers."""
    from p2p.channel.libp2p import open_libp2p_network

    findings = []
    if ticket is not None and ticket.expires and wall() > ticket.expires:
        findings.append(DoctorFinding("ticket", WRONG, f"it expired {wall() - ticket.expires:,.0f} s ago", "ask for a fresh one"))
    try:
        check_free(listen)
        async with open_libp2p_network(Identity.generate(), listen) as network:
            if listen:
                findings.append(judge_listening(network.addresses))
            return findings + await _examine_ways(network, listen, ticket)
    except UsageError as error:
        findings.append(DoctorFinding("port", WRONG, str(error), "choose another port, or /tcp/0 for a free one"))
    except (ShoalError, OSError) as error:
        findings.append(DoctorFinding("port", WRONG, f"no network is to be had: {error}", "see the log with --verbose"))
    return findings + await _examine_ways(None, (), ticket)


async def _examine_ways(network: Network | None, listen: Sequence[str], ticket: Ticket | None) -> list[DoctorFinding]:
    if ticket is None:
        return []
    answers = await dial_all(ticket)
    findings = [judge_dialled(answers)]
    ahead = [a.ahead_s for a in answers if a.ahead_s is not None]
    findings += [judge_ahead(min(ahead, key=abs))] if ahead else []
    seen = next((a.seen for a in answers if a.reached and not a.why), "")
    if seen:
        came_back = await _try_from_outside(network, seen) if network is not None and listen else None
        findings.append(judge_seen(seen, own_hosts(), came_back))
    return findings


async def _try_from_outside(network: Network, seen: str) -> FindingState:
    """Whether the port that `network` listens on answers at the address from which the learner sees this machine come."""
    ports = {text.split("/")[4] for text in network.addresses}
    host = "/".join(seen.split("/")[:3])
    for port in sorted(ports):
        if await _answers(network.peer_id, f"{host}/tcp/{port}"):
            return OK
    return WARNING


async def _answers(peer: str, address: str) -> bool:
    from p2p.channel.libp2p import open_libp2p_network

    async with open_libp2p_network(Identity.generate(), []) as other:
        with trio.move_on_after(HANDSHAKE_S):
            try:
                await (await other.open(peer, [f"{address}/p2p/{peer}"], CONTROL)).aclose("only looking")
                return True
            except ChannelClosed:
                return False
    return False
