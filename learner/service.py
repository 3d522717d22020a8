"""`shoal learner`: prepares the run directory, starts head and trainer, and brings both to a good end.

Thin shell. Must not know torch.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import trio

from learner.admission.head_door import HEAD_WAIT_S, HeadDoor
from learner.admission.issuing import TICKET_FILE, own_ticket, ticket_text
from learner.admission.peers_file import PEERS_FILE, PeersFile
from learner.admission.records import RUN_TICKET
from learner.audited_run import run_audits
from learner.client.messages import BESIDE_SOCKET
from learner.config import LearnerConfig, TaskSection, resolved
from learner.data_digests import changed_data
from learner.endpoint.reader import Offer
from learner.endpoint.service import Endpoint
from learner.environments.running import running_environment, set_environment
from learner.evaluation.opening import EvalOpener, EvalWish
from learner.evaluation.plan import EvalPlan
from learner.evaluation.settings import EvalTask, eval_plan
from learner.head.children import LOCAL_ENGINE, keep_local_engine, keep_trainer, watch_external
from learner.head.farewell import farewell
from learner.head.head import Head
from learner.head.provider import Provider
from learner.head.trainer_server import serve_trainer
from learner.journal.journal import CommittedStep, Journal
from learner.model_folder import ModelFolder, open_model_folder
from learner.rewards.group_scorer import PooledScorer
from learner.rollouts.controller import Rollouts
from learner.rollouts.group_spec import RolloutSettings
from learner.rollouts.outcomes import Sampling, TurnLimits
from learner.rollouts.stop_strings import StopStrings, check_stop_strings
from learner.run_dir import existing_run, kept_listen
from learner.status.live import EventLog, collected_events
from learner.status.server import serve_status
from learner.status.steps import RECENT
from learner.tasks.port import Task
from learner.tasks.prompting import decode_completion, encode_prompt, fit_prompts, stop_tokens
from learner.tasks.registry import open_task
from learner.tracking.keeping import Trackers
from learner.trainer.adapter.peft_form import adapter_file, check_same_adapter
from learner.trainer.checkpoints.forms import check_devices
from p2p.allowance.keeper import AllowanceKeeper
from p2p.allowance.limits import NO_LIMITS
from p2p.errors import UsageError
from p2p.files import write_whole
from p2p.identity import Identity
from p2p.protocol.descriptor import pack_descriptor
from p2p.uplink_file import keep_uplink, recall_uplink

log = logging.getLogger("shoal.learner")

Announce = Callable[[str, dict[str, Any]], None]
"""Hears ("ready", {ticket, status_port, run, run_dir, endpoint, endpoint_key}) once nodes can join, then ("status", the run's
state) once a second, in a thread of its own."""

TELL_S = 1.0
"""Seconds between two states that whoever started the learner hears: a person does not read faster."""

MOST_TELL_S = 10.0
"""Seconds between two of them at the most: a terminal that was stopped for a while soon shows the run again."""

TELL_SHARE = 0.05
"""Share of the time that telling may take: the nodes come first."""


class PreparedRun(NamedTuple):
    """A run and its directory."""

    run: str
    """the run's id"""
    run_dir: Path


def prepare_run(config: LearnerConfig, *, resume: bool) -> PreparedRun:
    """Make or check the run directory. UsageError when it does not fit the wish.

    Changes nothing in a directory that holds a run: a learner may be running on it, and only the journal's lock tells.
    """
    run_dir = Path(config.run_dir)
    run = existing_run(run_dir, resume=resume)
    try:
        for folder in ("logs", "checkpoints", "versions", "batches"):
            (run_dir / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the run directory {run_dir}: {error.strerror}") from None
    if run is None:
        run = secrets.token_hex(8)
        write_whole(run_dir / "run.json", json.dumps({"run": run}))
    return PreparedRun(run, run_dir)


GC_THRESHOLDS = (20_000, 20, 100)
"""New values, and rounds of the generation below, until Python looks for garbage in its three generations: by default a small
fraction of that, which a head of a thousand nodes reaches many times a second."""


def calm_gc() -> None:
    """For a process that lives long and makes many small values that refer to nobody: what is here now, the libraries, is not
    looked through again and again for garbage, and new values less often. The head of a thousand nodes spent an eighth of its
    time, and pauses of a quarter second, on it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def check_work_left(run_dir: Path, last: CommittedStep | None, steps: int) -> None:
    """UsageError when the run is over. One that was killed between its last commit and its end is not: it still has to
    publish the last version and to say goodbye."""
    if last is not None and last.step >= steps and (run_dir / "summary.json").exists():
        raise UsageError(f"nothing left to do: step {last.step} of {steps} is committed and the run has ended")


def _listen(run_dir: Path, config: LearnerConfig) -> list[str]:
    """Where to listen: as configured the first time, on the very same ports after that (tickets name them)."""
    return kept_listen(run_dir) or list(config.swarm.listen)


def _keep_ports(run_dir: Path, listen: list[str], addresses: list[str]) -> None:
    ports = [a.split("/tcp/")[1].split("/")[0] for a in addresses if "/tcp/" in a]
    fixed = [a.replace("/tcp/0", f"/tcp/{ports[0]}") if ports else a for a in listen]
    write_whole(run_dir / "listen.json", json.dumps(fixed))


async def run_learner(
    config: LearnerConfig, *, resume: bool = False, announce: Announce | None = None
) -> dict[str, Any]:
    """Run to the configured number of steps; the final status. UsageError for bad input, ShoalError when the run cannot go on
    (it can be resumed)."""
    from p2p.channel.libp2p import open_libp2p_network

    limits = NO_LIMITS.changed({"max_up_mbit": config.swarm.max_up_mbit})
    model = open_model_folder(config.model)
    task = await trio.to_thread.run_sync(partial(open_run_task, config, model))
    trainer_config = config.trainer_config()
    async with AsyncExitStack() as held:
        log_lines = held.enter_context(collected_events())
        # Abandoned: what they wait for ends with the processes that score. (mypy sees trio-typing's stubs, older than trio.)
        in_thread: Any = partial(trio.to_thread.run_sync, abandon_on_cancel=True)  # type: ignore[call-arg]
        scorer = held.enter_context(
            PooledScorer(task, config.task, allow_unconfined=config.task.allow_unconfined, in_thread=in_thread)
        )
        opener = EvalOpener(model.tokenizer, model.context, config.environment, stop_ids=model.stop_ids, in_thread=in_thread)
        evaluations = await held.enter_async_context(opener.opened(list(_evaluations(config, model, task))))
        run, run_dir = prepare_run(config, resume=resume)
        journal = held.enter_context(Journal.open(run_dir / "journal.sqlite", run))
        # The run is ours alone from here on, so its files may be written.
        books = held.enter_context(PeersFile.open(run_dir / PEERS_FILE, wait_s=HEAD_WAIT_S))
        check_same_adapter(run_dir, trainer_config.lora)
        last = journal.last_commit()
        if last is not None and not config.external_trainer:
            check_devices(Path(last.checkpoint), trainer_config.devices)
        check_work_left(run_dir, last, trainer_config.steps)
        write_whole(run_dir / "config.toml", resolved(config), private=True)
        write_whole(run_dir / "trainer.json", trainer_config.model_dump_json(indent=1), private=True)
        (run_dir / "summary.json").unlink(missing_ok=True)  # of an earlier end: this run goes on
        for line in changed_data(run_dir, task, evaluations, resume=resume):
            log.warning("%s", line)
        if not resume:
            (run_dir / "listen.json").unlink(missing_ok=True)  # of a start that was refused
        identity = Identity.load_or_create(run_dir / "head.key")
        keeper = AllowanceKeeper(limits, run_dir)
        listen = _listen(run_dir, config)
        stops = _stops(model, task)
        async with (
            running_environment(task, model.tokenizer, model.stop_ids, config.environment, seed=config.task.seed) as runner,
            open_libp2p_network(identity, listen, meter=keeper.meter) as network,
        ):
            if runner is not None and runner.tools:  # prompts are longer from here on
                await trio.to_thread.run_sync(fit_prompts, task, model.tokenizer, model.context)
            _keep_ports(run_dir, listen, list(network.addresses))
            rollouts = _rollout_settings(config, stops, _stop_strings(model, task), turns=runner is not None)
            head = Head(
                config=config, run=run, run_dir=run_dir, identity=identity, network=network, journal=journal,
                door=HeadDoor(books), open_rollouts=lambda head: Rollouts(
                    rollouts, journal, task, model.tokenizer, model.vocab_size, epoch=head.epoch, send=head.send,
                    nodes=head.node_views, report=head.report, conduct=head.trust, scorer=scorer, runner=runner,
                    in_thread=in_thread,
                ),
            )  # fmt: skip
            scorer.lost.proven = head.trust.proven_here
            head.evaluate(evaluations)
            head.rollouts.buffers.stop_at(trainer_config.steps)
            head.requests.book.max_context = model.context
            if config.local_engine.engine:
                own = run_dir / LOCAL_ENGINE
                own.mkdir(exist_ok=True)
                peer = Identity.load_or_create(own / "node.key").peer_id
                head.expect_local_engine(peer)
                near = tuple(reversed(network.addresses))  # loopback is the last
                ticket = own_ticket(books, LOCAL_ENGINE, time.time(), (peer,))
                write_whole(own / "ticket.txt", ticket_text(identity, run, near, ticket) + "\n", private=True)
            if config.audit.share:
                head.audit(run_audits(
                    config, head, model, rollouts.sampling,
                    lambda index: encode_prompt(model.tokenizer, task.prompt(index), task.chat_format),
                ))  # fmt: skip
            head.publisher.offer_descriptor(pack_descriptor(model.path, adapter_file(trainer_config.lora, config.model)))
            addresses = tuple(config.swarm.announce) or tuple(network.addresses)
            text = ticket_text(identity, run, addresses, own_ticket(books, RUN_TICKET, time.time()))
            write_whole(run_dir / TICKET_FILE, text + "\n", private=True)
            a = config.activation
            head.provider = Provider(
                head.keeper.pool.advice, run, text, command=a.ask_command, url=a.ask_url, every_s=a.ask_every_s
            )
            endpoint = None
            if config.endpoint.listen:
                endpoint = Endpoint(config.endpoint, run_dir, Offer(
                    requests=head.requests,
                    version=lambda: head.publisher.current, tokenizer=model.tokenizer, vocab_size=model.vocab_size,
                    stop_ids=stops, model=config.model, context=model.context, chat_format=task.chat_format,
                ))  # fmt: skip
            return await _run(
                config, head, run_dir, text, announce=announce, log_lines=log_lines, endpoint=endpoint, keeper=keeper
            )


def open_run_task(config: LearnerConfig, model: ModelFolder) -> Task:
    """The run's task, without prompts that are longer than its model takes. Reads all of its data. UsageError as `open_task`."""
    task = _open_task(config.task, model, own_score=config.own_score)
    set_environment(task, config.environment)
    if task.environment is not None and config.task.reward:
        raise UsageError("task.reward: an environment rewards its episodes itself; leave the reward functions out")
    return task


def _open_task(settings: TaskSection | EvalTask, model: ModelFolder, *, own_score: bool) -> Task:
    task = open_task(settings, own_score=own_score)
    check_stop_strings(model.tokenizer, task.stop)
    fit_prompts(task, model.tokenizer, model.context)
    return task


def _stops(model: ModelFolder, task: Task) -> tuple[int, ...]:
    return tuple(sorted({*model.stop_ids, *stop_tokens(model.tokenizer, task.stop)}))


def _stop_strings(model: ModelFolder, task: Task) -> StopStrings | None:
    return StopStrings(partial(decode_completion, model.tokenizer), task.stop) if task.stop else None


def _evaluations(config: LearnerConfig, model: ModelFolder, task: Task) -> Iterator[EvalWish]:
    """The default evaluation and those of the tables [[eval]]. UsageError for a table whose task is not to be had."""
    longest = config.rollout.max_new_tokens
    if config.trainer.eval_size:
        plan = EvalPlan(
            name="", prompts=config.trainer.eval_size, samples=1, every=config.trainer.eval_every, at_start=True, at_end=True,
            temperature=0.0, top_p=1.0, max_new_tokens=longest, stop_ids=_stops(model, task), seed=config.seed,
            stop=_stop_strings(model, task),
        )  # fmt: skip
        yield EvalWish(
            plan=plan, task=task, task_seed=config.task.seed, rewards=config.task,
            allow_unconfined=config.task.allow_unconfined, held_out=True, optional=True,
        )  # fmt: skip
    for section in config.eval:
        of: Task = task
        settings: TaskSection | EvalTask = config.task
        if section.task is not None:
            settings = section.task
            of = _open_task(settings, model, own_score=not (settings.reward or section.environment))
            if section.environment:
                set_environment(of, config.environment)
        plan = eval_plan(section, max_new_tokens=longest, stop_ids=_stops(model, of), seed=config.seed)
        yield EvalWish(
            plan=replace(plan, stop=_stop_strings(model, of)), task=of, task_seed=settings.seed, rewards=settings,
            allow_unconfined=settings.allow_unconfined, held_out=section.held_out,
        )  # fmt: skip


def _rollout_settings(
    config: LearnerConfig, stop_ids: tuple[int, ...], stop: StopStrings | None, *, turns: bool
) -> RolloutSettings:
    r, limits = config.rollout, TurnLimits(config.environment.max_turns, config.environment.turn_tokens) if turns else None
    return RolloutSettings(
        max_staleness=r.max_staleness, groups_per_step=r.groups_per_step, samples=r.samples, seed=config.seed,
        sampling=Sampling(r.max_new_tokens, stop_ids, r.temperature, r.top_p, turns=limits, stop=stop),
        micro_batch_groups=r.micro_batch_groups, stall_s=r.stall_s, finish_s=r.finish_s if r.on_update == "finish" else 0.0,
        strategies=config.dispatch, keep_equal=r.equal_groups == "train", extra_groups=r.extra_groups,
        extra_samples=r.extra_samples, truncate_stuck_s=r.truncate_stuck_s,
        overlong_tokens=0 if config.external_trainer else config.trainer.overlong_tokens,
    )  # fmt: skip


async def _run(
    config: LearnerConfig, head: Head, run_dir: Path, ticket: str, *, announce: Announce | None, log_lines: EventLog,
    keeper: AllowanceKeeper, endpoint: Endpoint | None = None,
) -> dict[str, Any]:  # fmt: skip
    token = trio.lowlevel.current_trio_token()
    result: dict[str, Any] = {}

    def status() -> dict[str, Any]:
        more = {"endpoint": endpoint.status()} if endpoint is not None else {}
        return head.status() | {"events": log_lines.events(), "limits": str(keeper.limits)} | more

    with ExitStack() as held:
        port = held.enter_context(serve_status(config.status.port, partial(trio.from_thread.run_sync, status, trio_token=token)))
        async with trio.open_nursery() as nursery:
            trackers = held.enter_context(Trackers(config.tracking.wanted, run_dir))
            calm_gc()
            recall_uplink(run_dir, head.swarm, config.swarm.uplink_mbit)
            await nursery.start(head.run)
            nursery.start_soon(keep_uplink, run_dir, head.swarm)
            keeper.tell(head.swarm)
            nursery.start_soon(keeper.run)
            nursery.start_soon(trackers.run)
            trainer = head.trainer_requests
            await nursery.start(partial(serve_trainer, run_dir, trainer.answer_beside, socket=BESIDE_SOCKET))
            await nursery.start(serve_trainer, run_dir, trainer.answer, trainer.on_gone)
            write_whole(run_dir / "status.json", json.dumps({"port": port, "pid": os.getpid()}))
            if endpoint is not None:
                await nursery.start(endpoint.run)
            if announce is not None:
                url, key = (endpoint.url, endpoint.key_where()) if endpoint is not None else ("", "")
                announce_ready(announce, {
                    "ticket": ticket, "status_port": port, "run": head.run_id, "run_dir": str(run_dir),
                    "endpoint": url, "endpoint_key": key,
                })  # fmt: skip
                nursery.start_soon(keep_telling, announce, status, trainer)
            if config.external_trainer:
                nursery.start_soon(watch_external, head)
            else:
                nursery.start_soon(keep_trainer, head, run_dir)
            if config.local_engine.engine:
                nursery.start_soon(keep_local_engine, head, run_dir, config.local_engine)
            await head.finished.wait()
            await farewell(head, "training is complete")
            result = status()
            write_whole(run_dir / "summary.json", json.dumps(result, indent=1))
            await trackers.finish()
            nursery.cancel_scope.cancel()
    return result


def announce_ready(announce: Announce, facts: dict[str, Any]) -> None:
    """Say that nodes can join. What fails there is said, and ends nothing: the ticket lies in the run directory."""
    try:
        announce("ready", facts)
    except Exception:
        log.exception("that nodes can join cannot be told (the run goes on; its ticket is %s/ticket.txt)", facts["run_dir"])


class LoggedSteps(Protocol):
    """How many steps a run's trainer has logged in this life."""

    logged: int
    news: trio.Event
    """set, and replaced, with each of them"""


async def keep_telling(
    announce: Announce, status: Callable[[], dict[str, Any]], steps: LoggedSteps | None = None
) -> None:  # fmt: skip
    """To a person's view, with each step that was logged and else every TELL_S. It draws in a thread: the head must not wait for
    a terminal. With a thousand nodes that takes a tenth of a second of the processor, so it may have TELL_SHARE of the time; but
    no step is kept back until the state has forgotten it. What fails there is said once, and ends nothing."""
    complained = False
    while True:
        began, told = trio.current_time(), steps.logged if steps is not None else 0
        try:
            await trio.to_thread.run_sync(announce, "status", status(), abandon_on_cancel=True)  # type: ignore[call-arg]
        except Exception:
            if not complained:
                complained = True
                log.exception("the run's state cannot be told (said once; the run goes on)")
        least = min((trio.current_time() - began) / TELL_SHARE, MOST_TELL_S)
        if steps is None:
            await trio.sleep(max(TELL_S, least))
            continue
        with trio.move_on_after(max(TELL_S, least)):
            await _logged(steps, told + 1)
            with trio.move_on_after(least):
                await _logged(steps, told + RECENT // 2)


async def _logged(steps: LoggedSteps, count: int) -> None:
    while steps.logged < count:
        await steps.news.wait()
