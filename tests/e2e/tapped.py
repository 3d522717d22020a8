"""`python -m tests.e2e.tapped LOG VERB ...`: the `shoal` command, with what it sends, accepts and finishes written to LOG.

One JSON line each, before anything else happens to it and by one write, so that SIGKILL loses none: ["sent", request id, start,
count] by a node, as it hands tokens to its link; ["accepted", group id.member.0, start, count] by a learner, as its collector
takes them; ["finished", base64 of `pack_groups`] as a rewarded group goes to the journal. """

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

from learner.journal import Journal
from learner.pieces import Unwritten
from learner.trajectory import Group, pack_groups
from node.agent import Agent
from p2p.protocol.messages import Tokens
from p2p.version import Version


def tap(log: int) -> None:
    """From here on this process writes its tokens down."""
    add, record_finished, to_head = Unwritten.add, Journal.record_finished, Agent._to_head

    def write(*values: object) -> None:
        os.write(log, (json.dumps(values) + "\n").encode())

    def accepted(
        self: Unwritten, group_id: int, member: int, node: str, start: int, version: Version, ids: bytes, logprobs: bytes
    ) -> None:
        write("accepted", f"{group_id}.{member}.0", start, len(ids) // 4)
        add(self, group_id, member, node, start, version, ids, logprobs)

    def finished(self: Journal, group: Group) -> None:
        write("finished", base64.b64encode(pack_groups((group,))).decode())
        record_finished(self, group)

    def sent(self: Agent, message: Any) -> None:
        if isinstance(message, Tokens):
            for run in message.runs:
                write("sent", run.request_id, run.start, len(run.ids) // 4)
        to_head(self, message)

    Unwritten.add, Journal.record_finished, Agent._to_head = accepted, finished, sent  # type: ignore[method-assign]


if __name__ == "__main__":
    from shoal import main

    tap(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    sys.exit(main(sys.argv[2:]))
