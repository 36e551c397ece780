"""A world of ranks on a virtual clock: the merge protocol itself, over links that fail as a schedule says.

Everything but the sockets and the threads is what runs in a job: the agreement, the coordinator, frames as bytes, the
inbox, the record. A schedule is drawn from a seed alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from aggregator.collective.account import Account
from aggregator.collective.agreement import agree
from aggregator.collective.coordinator import Coordinator
from aggregator.collective.frames import Frame, parse_header
from aggregator.collective.inbox import CloseRequested, Inbox, Recorded, Submitted
from aggregator.collective.neighbours import Neighbours
from aggregator.collective.record import Record
from aggregator.collective.tree import TreePosition, plan_tree
from aggregator.collective.waiting import Member, Waiting
from aggregator.collective.waits import Waits
from telemetry.errors import RankfoldError
from telemetry.packet import Packet
from telemetry.protocol import AttachOffer, CloseReport, Deadlines
from tests.collective.worlds import MemoryRecorder

__all__ = ["DEADLINES", "Links", "Plan", "SimulatedRank", "SimulatedWorld"]

DEADLINES = Deadlines(attach_s=30, merge_s=10, close_s=20)


@dataclass(frozen=True)
class Links:
    """What the links of a world do to a frame, as probabilities; times are in seconds."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0
    keeps_order: bool = True


@dataclass
class Plan:
    """What one rank does, in seconds of the virtual clock.

    Attributes:
        offer: that it brings to attach.
        comes_at: when it attaches.
        steps: (seconds after attach, packet), ascending.
        closes_after_s: its attach.
        dies_at: when its process ends, None for never.
        is_noticed: whether its neighbours see their connections end when it dies, or it is just silent.
        fails_at: step that its recorder cannot write.
        records_s: how long a step is merged before it is durable, at most.
    """

    offer: AttachOffer
    comes_at: float
    steps: list[tuple[float, Packet]]
    closes_after_s: float
    dies_at: float | None = None
    is_noticed: bool = True
    fails_at: int | None = None
    records_s: float = 0.0


@dataclass
class SimulatedRank:
    """One process, and what became of it."""

    plan: Plan
    position: TreePosition
    inbox: Inbox = field(default_factory=Inbox)
    recorder: MemoryRecorder = field(default_factory=MemoryRecorder)
    coordinator: Coordinator | None = None
    process: Waiting[None] | None = None
    is_dead: bool = False
    refusal: RankfoldError | None = None
    report: CloseReport | None = None
    attached_at: float | None = None
    closed_at: float | None = None
    ended_at: float | None = None
    deadline: float | None = None


class SimulatedWorld:
    """Runs the ranks until nothing is left to happen."""

    def __init__(self, plans: list[Plan], hosts: list[str], fan_in: int, links: Links, random: Random) -> None:
        self.now = 0.0
        self.links, self.random = links, random
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        tree = plan_tree(hosts, fan_in)
        self.ranks = [SimulatedRank(plan, position) for plan, position in zip(plans, tree, strict=True)]
        for rank in self.ranks:
            rank.recorder = MemoryRecorder(fail_at=rank.plan.fails_at)
            if rank.plan.records_s:
                rank.recorder.defer = lambda write, rank=rank: self._record_late(rank, write)
            self.at(rank.plan.comes_at, lambda rank=rank: self._start(rank))
            if rank.plan.dies_at is not None:
                self.at(rank.plan.dies_at, lambda rank=rank: self._die(rank))

    def run(self, until_s: float = 1e5) -> None:
        """Let everything happen that happens before ``until_s``."""
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now, _, happen = heapq.heappop(self._agenda)
            happen()

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Enter something in the agenda."""
        heapq.heappush(self._agenda, (max(time, self.now), next(self._numbers), happen))

    def wake(self, rank: SimulatedRank) -> None:
        """Let a rank act on what is in its inbox."""
        while rank.process is not None and not rank.is_dead and (event := rank.inbox.poll()) is not None:
            self._advance(rank, event)

    def _start(self, rank: SimulatedRank) -> None:
        if not rank.is_dead:
            rank.process = self._process(rank)
            self._advance(rank, None)
            self.wake(rank)

    def _advance(self, rank: SimulatedRank, event: Any) -> None:
        assert rank.process is not None
        try:
            rank.deadline = deadline = rank.process.send(event)
        except StopIteration:
            rank.process, rank.ended_at = None, self.now
            return
        self._require_told_what_is_durable(rank)
        if deadline is not None:
            self.at(deadline, lambda: self._pass_deadline(rank, deadline))

    def _require_told_what_is_durable(self, rank: SimulatedRank) -> None:
        durable = [step.step for step in self.ranks[0].recorder.steps]
        account = rank.coordinator.account if rank.coordinator is not None else Account()
        assert account.num_committed <= len(durable)
        assert account.last_committed_step is None or account.last_committed_step in durable

    def _pass_deadline(self, rank: SimulatedRank, deadline: float) -> None:
        if rank.process is not None and not rank.is_dead and rank.deadline == deadline:
            self._advance(rank, None)

    def _process(self, rank: SimulatedRank) -> Waiting[None]:
        """The merging thread of one rank, as ``CollectiveAggregator`` runs it."""
        links = {peer: _Link(self, rank, self.ranks[peer]) for peer in rank.position.neighbours}
        waits = Waits(rank.position, rank.plan.offer.deadlines)
        member = Member(rank.position, waits, Neighbours(rank.position, links), lambda: self.now)
        is_root = rank.position.parent is None
        record = Record(lambda: rank.recorder, lambda: rank.inbox.put(Recorded())) if is_root else None
        rank.coordinator = Coordinator(member, record)
        try:
            yield from agree(rank.plan.offer, member, record, dict)
        except RankfoldError as error:
            rank.refusal = error
            member.neighbours.close(0.0)
            return
        rank.attached_at = self.now
        self._train(rank)
        rank.report = yield from rank.coordinator.serve()
        member.neighbours.close(0.0)

    def _record_late(self, rank: SimulatedRank, write: Callable[[], None]) -> None:
        def happen() -> None:
            if not rank.is_dead:
                write()
                self.wake(rank)

        self.at(self.now + self.random.uniform(0.0, rank.plan.records_s), happen)

    def _train(self, rank: SimulatedRank) -> None:
        """The training thread: it submits its steps while merging runs, and closes."""
        for after_s, packet in rank.plan.steps:
            self.at(self.now + after_s, lambda packet=packet: self._submit(rank, packet))
        self.at(self.now + rank.plan.closes_after_s, lambda: self._close(rank))

    def _submit(self, rank: SimulatedRank, packet: Packet) -> None:
        assert rank.coordinator is not None
        if rank.coordinator.failure is None:
            rank.inbox.put(Submitted(packet, self.now))
            self.wake(rank)

    def _close(self, rank: SimulatedRank) -> None:
        if not rank.is_dead:
            rank.closed_at = self.now
            rank.inbox.put(CloseRequested(self.now))
            self.wake(rank)

    def _die(self, rank: SimulatedRank) -> None:
        if rank.ended_at is not None:
            return
        rank.is_dead = True
        for peer in rank.position.neighbours if rank.plan.is_noticed else ():
            self.at(
                self.now + self.random.uniform(0, 1), lambda peer=self.ranks[peer]: self.break_link(peer, rank, "reset")
            )

    def break_link(self, rank: SimulatedRank, peer: SimulatedRank, reason: str) -> None:
        """Let a rank see that its connection to ``peer`` has ended."""
        rank.inbox.on_broken(peer.position.rank, reason)
        self.wake(rank)


class _Link:
    """One direction of a link, with the faults of the schedule."""

    def __init__(self, world: SimulatedWorld, sender: SimulatedRank, receiver: SimulatedRank) -> None:
        self._world, self._sender, self._receiver = world, sender, receiver
        self._last_arrival = 0.0

    def post(self, frame: Frame) -> None:
        header, payload = frame.encode()
        for arrival in self._arrivals():
            self._world.at(arrival, lambda: self._deliver(header, bytes(payload)))

    def _arrivals(self) -> Iterator[float]:
        random, links = self._world.random, self._world.links
        if random.random() < links.drop:
            return
        for _ in range(2 if random.random() < links.duplicate else 1):
            late_s = random.uniform(0, links.delay_s) if random.random() < links.delay else 0.0
            arrival = self._world.now + random.uniform(1e-4, 1e-2) + late_s
            if links.keeps_order:
                arrival = max(arrival, self._last_arrival)
            self._last_arrival = max(arrival, self._last_arrival)
            yield arrival

    def _deliver(self, header: bytes, payload: bytes) -> None:
        kind, number, length = parse_header(header)
        assert length == len(payload)
        self._receiver.inbox.on_frame(self._sender.position.rank, Frame.decode(kind, number, payload))
        self._world.wake(self._receiver)

    def end(self) -> None:
        arrival = max(self._world.now + 1e-2, self._last_arrival)
        self._world.at(arrival, lambda: self._world.break_link(self._receiver, self._sender, "it ended the connection"))

    def release(self, deadline: float) -> None:
        """Nothing is held."""
