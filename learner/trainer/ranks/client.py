"""The head's door for several ranks: rank 0 asks the head, the others are told. Must not know torch, models or sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from learner.client.port import ResumeInfo, TrainerClient, Weights
from learner.trainer.ranks.port import RankFailed, Ranks
from learner.trajectory import MicroBatch, pack_groups, unpack_groups
from p2p.errors import ShoalError


class RankedClient:
    """Implements `learner.client.port.TrainerClient` on each rank. `client`: rank 0's; the others have none.

    An error of rank 0's is raised there as it is, and as a RankFailed on the others.
    """

    def __init__(self, client: TrainerClient | None, ranks: Ranks) -> None:
        self._client, self._ranks = client, ranks

    def resume(self) -> ResumeInfo:
        """`TrainerClient.resume`."""
        def ask(client: TrainerClient) -> list[Any]:
            start = client.resume()
            return [start.epoch, start.step, None if start.checkpoint is None else str(start.checkpoint)]

        epoch, step, checkpoint = self._told(ask)
        return ResumeInfo(epoch, step, None if checkpoint is None else Path(checkpoint))

    def batches(self, step: int) -> Iterator[MicroBatch]:
        """`TrainerClient.batches`: every rank gets all groups."""
        stream = self._client.batches(step) if self._client is not None else iter(())
        while True:
            told = self._told(lambda _: _packed(next(stream, None)))
            if told is None:
                return
            of, groups, last, total = told
            yield MicroBatch(of, unpack_groups(groups), last, total)
            if last:
                return

    def commit(self, step: int, checkpoint: Path) -> None:
        self._told(lambda client: client.commit(step, checkpoint))

    def due(self, step: int) -> bool:
        return bool(self._told(lambda client: client.due(step)))

    def publish(self, step: int, tensors: Weights, *, wait: bool = True) -> None:
        """Rank 0 publishes what all of them hold: `tensors` is a source that the others serve meanwhile."""
        if self._client is not None:
            self._client.publish(step, tensors, wait=wait)
            tensors.dismiss()  # type: ignore[union-attr]
        else:
            tensors.serve()  # type: ignore[union-attr]

    def discard(self, step: int, group_ids: Sequence[int], reason: str) -> None:
        if self._client is not None:
            self._client.discard(step, group_ids, reason)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._client is not None:
            self._client.log(step, metrics)

    def finish(self) -> None:
        self._told(lambda client: client.finish())

    def _told(self, ask: Callable[[TrainerClient], Any]) -> Any:
        """What rank 0's client answers, on every rank."""
        if self._client is None:
            failed, answer = msgpack.unpackb(self._ranks.share(b""))
            if failed:
                raise RankFailed(f"rank 0: {failed}")
            return answer
        try:
            answer = ask(self._client)
        except (ShoalError, OSError, ValueError) as error:
            self._ranks.share(msgpack.packb([f"{type(error).__name__}: {error}", None]))
            raise
        self._ranks.share(msgpack.packb([None, answer]))
        return answer


def _packed(batch: MicroBatch | None) -> list[Any] | None:
    return None if batch is None else [batch.step, pack_groups(batch.groups), batch.last, batch.total]
