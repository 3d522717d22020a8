"""What the head adds to a line of metrics, and what it tells the status page, on a mock clock: the catalogue lists all of it and
nothing else. The trainer's keys are checked in tests/unit/test_metrics_catalogue.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import trio
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from learner.client.messages import Begin, CommitStep, Log, SealVersion, SegmentDone
from learner.head.head import Head
from learner.rollouts.group import parse_request
from learner.status.catalogue import entries
from learner.status.exposition import metrics_text
from p2p.errors import Refusal
from p2p.identity import Identity
from p2p.protocol.generation import GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent
from p2p.protocol.versions import Installed
from p2p.version import Version
from p2p.weights.encode import encode_version
from tests.support.harness import changed_state, make_state
from tests.swarm.test_head import Node, good, open_head

LOCAL_ENGINE = Identity.from_seed(b"\x77" * 32)


async def publish_delta(head: Head, step: int) -> bytes:
    """A delta against the version that `open_head` published; its state's digest."""
    old = make_state(1)
    new = changed_state(old, 2)
    begun = head.trainer_requests.on_begin(Begin(step, "delta", 0, "layout"))
    size = head.config.swarm.segment_bytes
    for s in encode_version(new, old, head.store, segment_bytes=size, chunk_bytes=begun.chunk_bytes):
        head.publisher.segment(SegmentDone(begun.mid, s.index, s.size, b"".join(s.digests), s.changed, s.words))
    await head.trainer_requests.on_seal(SealVersion(begun.mid, b"".join(new.tensor_digests()), new.digest(), 0.5))
    return new.digest()


async def all_but_the_second(node: Node, request: GenerateRequest) -> None:
    name = parse_request(request.request_id)
    assert name is not None
    if name.member == 1:
        ids, logprobs = (3, 3, 3), np.full(3, -0.3, np.float32)
        await node.say(Tokens((TokenEvent.of(request.request_id, 0, ids, logprobs, node.version),)))
    else:
        await trio.sleep(0.3)
        await good(node, request)


async def test_the_head_writes_what_is_listed_and_nothing_else(tmp_path: Path, autojump_clock) -> None:
    run_dir = tmp_path / "run"
    async with open_head(run_dir, max_new_tokens=50, extra_samples=1, own=LOCAL_ENGINE.peer_id) as bench:
        head = bench.head
        node = await bench.join(all_but_the_second, capacity=8)
        for step in (0, 1):
            await bench.batch(step, 60)
            head.trainer_requests.on_commit(CommitStep(step + 1, ""))
            if step == 0:
                digest = await publish_delta(head, 1)
                node.digest = digest
                node.version = bench.version = Version(1, 1)
                await node.say(Installed(node.version, digest, 0.1, 0.2, 0.3, 10, 20))
                await bench.until(lambda: head.nodes[node.peer].digest_ok)
        await bench.batch(2, 60)  # a local engine tells of a step when the next begins
        head.report(node.peer, Refusal("not what was asked for"))
        head.trainer_requests.on_log(Log(2, json.dumps({"loss/mean": float("nan"), "mine": 1.5})))
        status = json.loads(json.dumps(head.status(), allow_nan=False))

    [line] = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert line == status["metrics"] and line["loss/mean"] is None and line["mine"] == 1.5
    turns = {e for e in entries("head") if e.key.startswith("episodes/")}  # of tasks with an environment
    audits = {e for e in entries("head") if e.key.startswith("audit/")}  # of runs with audits: tests/swarm/test_audits.py
    assert set(line) - {"loss/mean", "mine"} == {e.key for e in entries("head") if e.key and e not in turns | audits}

    page = {}
    for family in text_string_to_metric_families(metrics_text(status, "application/openmetrics-text").body.decode()):
        page |= {sample.name: sample.value for sample in family.samples}
    assert set(page) == {
        e.series for e in entries("head") if e.name and e not in turns
        and (e not in audits or "remade" in e.key)  # the trainer's own pass has some made again, too
    } | {"shoal_other"}  # fmt: skip
    assert page["shoal_refusals_total"] == 1 and page["shoal_published_step"] == 1 and page["shoal_committed_step"] == 2
    assert page["shoal_redundancy_surplus_sequences_total"] == line["redundancy/surplus_sequences"] > 0
    assert page["shoal_broadcast_max_seconds"] == line["broadcast/max_s"]
