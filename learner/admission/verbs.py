"""The verbs `shoal ticket`, `ban` and `unban`: their flags, and what they print. Imports what it needs when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verbs(verbs: Any, verb: AddVerb) -> None:
    """`verbs`: argparse's subparsers of the whole command."""
    p = verb("ticket", _list, "make, list and revoke the tickets by which nodes join a run", verbs)
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")
    p = verb("new", _new, "make a ticket, and print it: whoever has it may join", actions)
    _of_run(p)
    p.add_argument("--name", default="", help="name of the ticket, for prices and lists (default ticket-1, ticket-2, ...)")
    p.add_argument("--expires", default="", metavar="TIME", help="time until it brings nobody new: 12h, 7d (default never)")
    p.add_argument("--uses", default="", metavar="N", help="identities that it may bring (default any number)")
    p.add_argument("--rate", default="", metavar="N/h", help="new identities that it may bring in an hour (default any number)")
    p.add_argument("--allow", action="append", default=[], metavar="PEER",
                   help="peer id that it is good for; others are refused (may be repeated; default anybody)")
    p.add_argument("--usd-per-hour", default="", metavar="USD",
                   help="what an hour of a node costs that joins with it, whatever the node says (default what the node says)")
    p = verb("list", _list, "show a run's tickets: what each is good for, and how many it brought", actions)
    _of_run(p)
    p = verb("revoke", _revoke, "end a ticket, and the links of who came by it", actions)
    p.add_argument("which", metavar="NAME", help="name or id of the ticket (shoal ticket list)")
    _of_run(p)

    p = verb("ban", _ban, "keep a peer out of a run, and end its link; without a peer, show who is banned", verbs)
    p.add_argument("peer", metavar="PEER", nargs="?", help="peer id, or its end as shoal status shows it")
    _of_run(p)
    p.add_argument("--why", default="", help="reason, which the peer is told")
    p.add_argument("--for", dest="for_", default="", metavar="TIME",
                   help="time after which it may come again: 12h, 7d (default never)")
    p = verb("unban", _unban, "let a peer come again that was banned, or that the learner expelled", verbs)
    p.add_argument("peer", metavar="PEER", help="peer id, or its end")
    _of_run(p)


def _of_run(p: argparse.ArgumentParser) -> None:
    p.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run's directory; its learner may be running")


def _new(args: argparse.Namespace) -> dict[str, Any]:
    from learner.admission.commands import TicketWish, new_ticket
    from learner.admission.periods import count_of, dollars_of, hourly_of, seconds_of

    made = new_ticket(args.run_dir, TicketWish(
        name=args.name, expires_s=seconds_of("--expires", args.expires) if args.expires else 0.0,
        uses=count_of("--uses", args.uses) if args.uses else 0, rate=hourly_of("--rate", args.rate) if args.rate else 0,
        allow=tuple(args.allow), usd_per_hour=dollars_of("--usd-per-hour", args.usd_per_hour) if args.usd_per_hour else None,
    ))  # fmt: skip
    if not args.json:
        print(made["ticket"])
    return {"ok": True, **made}


def _list(args: argparse.Namespace) -> dict[str, Any]:
    from learner.admission.commands import list_tickets

    rows = list_tickets(args.run_dir)
    if not args.json:
        print(f"{'name':<20} {'state':<8} {'brought':>8} {'of':>6} {'an hour':>8} {'expires':<25} {'for':<10} {'$/h':>8}  id")
        for row in rows:
            price = f"{row['usd_per_hour']:g}" if row["usd_per_hour"] is not None else "-"
            whom = f"{len(row['allow'])} peers" if row["allow"] else "anybody"
            print(
                f"{row['name']:<20} {row['state']:<8} {row['brought']:>8} {row['uses'] or '-':>6} {row['rate'] or '-':>8} "
                f"{row['expires'] or 'never':<25} {whom:<10} {price:>8}  {row['id']}"
            )
    return {"ok": True, "tickets": rows}


def _revoke(args: argparse.Namespace) -> dict[str, Any]:
    from learner.admission.commands import revoke_ticket

    row = revoke_ticket(args.run_dir, args.which)
    if not args.json:
        print(f"the ticket {row['name']} is revoked; it had brought {row['brought']} identities, which have to go")
    return {"ok": True, **row}


def _ban(args: argparse.Namespace) -> dict[str, Any]:
    from learner.admission.commands import ban_peer, list_bans
    from learner.admission.periods import seconds_of

    if args.peer is None:
        bans = list_bans(args.run_dir)
        if not args.json:
            for ban in bans:
                print(f"{ban['peer']}  until {ban['until'] or 'unbanned'}  {ban['why']}")
        return {"ok": True, "bans": bans}
    ban = ban_peer(args.run_dir, args.peer, args.why, seconds_of("--for", args.for_) if args.for_ else 0.0)
    if not args.json:
        print(f"{ban['peer']} is banned{' until ' + ban['until'] if ban['until'] else ''}")
    return {"ok": True, **ban}


def _unban(args: argparse.Namespace) -> dict[str, Any]:
    from learner.admission.commands import unban_peer

    result = unban_peer(args.run_dir, args.peer)
    if not args.json:
        print(f"{result['peer']} may come again{'' if result['was_banned'] else ' (it was not banned)'}")
    return {"ok": True, **result}
