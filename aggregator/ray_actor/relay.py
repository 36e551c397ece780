"""A relay: merges the packets of a few ranks into one on their way to the root, and passes its answer back.

It keeps nothing that cannot be lost. Whatever happens to it or above it, the ranks deliver again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from aggregator.merge import merge_packets
from aggregator.ray_actor.membership import StepKey
from aggregator.ray_actor.messages import Receipt, State
from telemetry.errors import RankfoldError
from telemetry.packet import Packet

__all__ = ["Relay"]

_REMEMBERED: Final = 256

Send = Callable[[bytes, StepKey | None], Awaitable[Receipt]]


@dataclass
class _Batch:
    """Packets of one step that go up together."""

    parts: list[tuple[Packet, asyncio.Future[Receipt]]] = field(default_factory=list)
    previous: StepKey | None = None

    @property
    def ranks(self) -> set[int]:
        return {rank for packet, _ in self.parts for rank in packet.ranks}


class Relay:
    """Waits a moment for the packets of its ranks, so that most steps go up as one packet.

    Args:
        ranks: that deliver to it, directly or through other relays.
        send: delivers to the next actor; the same contract as :meth:`deliver`.
        linger_s: how long the first packet of a step waits for the others. Who misses it is not waited for until heard
            of again, and goes up in a packet of its own.
    """

    def __init__(self, ranks: Iterable[int], send: Send, linger_s: float) -> None:
        self._ranks = frozenset(ranks)
        self._send = send
        self._linger_s = linger_s
        self._loop = asyncio.get_running_loop()
        self._open: dict[StepKey, _Batch] = {}
        self._sent: OrderedDict[StepKey, set[int]] = OrderedDict()
        self._lagging: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def deliver(self, data: bytes, previous: StepKey | None) -> Receipt:
        """Take a packet; returns the receipt that the root gave for it."""
        try:
            packet = Packet.from_bytes(data)
        except RankfoldError as error:
            return Receipt(State.STOPPED, error=error)
        step = packet.segment, packet.step
        answer: asyncio.Future[Receipt] = self._loop.create_future()
        self._lagging.difference_update(packet.ranks)
        batch = self._open.get(step)
        if batch is not None and batch.ranks.intersection(packet.ranks):
            self._flush(step)
            batch = None
        if batch is None:
            batch = self._open[step] = _Batch()
            self._loop.call_later(self._linger_s, self._give_up, step, batch)
        batch.parts.append((packet, answer))
        if previous is not None:
            batch.previous = previous if batch.previous is None else max(previous, batch.previous)
        if batch.ranks | self._sent.get(step, set()) >= self._ranks - self._lagging:
            self._flush(step)
        return await answer

    def _give_up(self, step: StepKey, batch: _Batch) -> None:
        if self._open.get(step) is batch:
            self._lagging |= self._ranks - batch.ranks - self._sent.get(step, set())
            self._flush(step)

    def _flush(self, step: StepKey) -> None:
        batch = self._open.pop(step)
        self._sent.setdefault(step, set()).update(batch.ranks)
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)
        task = self._loop.create_task(self._send_up(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_up(self, batch: _Batch) -> None:
        parts = sorted(batch.parts, key=lambda part: part[0].ranks[0])
        receipt = await self._try([packet for packet, _ in parts], batch.previous)
        if receipt.state is State.CROSSING:
            # An earlier life of this relay sent some of these ranks up together with others.
            for packet, answer in parts:
                _resolve(answer, await self._try([packet], batch.previous))
            return
        for _, answer in parts:
            _resolve(answer, receipt)

    async def _try(self, packets: Sequence[Packet], previous: StepKey | None) -> Receipt:
        try:
            return await self._send(merge_packets(packets).to_bytes(), previous)
        except RankfoldError as error:
            return Receipt(State.STOPPED, error=error)
        except Exception:
            # The actor above is being started again, or gone: the ranks find out which when they join anew.
            return Receipt(State.UNKNOWN)


def _resolve(answer: asyncio.Future[Receipt], receipt: Receipt) -> None:
    if not answer.done():
        answer.set_result(receipt)
