"""The root of an attempt: where ranks agree, where their packets become steps, and where the record is closed.

Everything here runs on one event loop; what touches the disk or adds up packets runs on one further thread, in order.
Nothing here knows of Ray, apart from the two functions that are handed in.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

from aggregator.collective.absence import merge_stopped
from aggregator.collective.account import Account, report_to_wire
from aggregator.collective.ballot import Ballot
from aggregator.ray_actor.closing import Closer, Closing
from aggregator.ray_actor.ledger import Ledger, Mark, Written
from aggregator.ray_actor.meeting import Meeting, newcomer_refusal, read_charter
from aggregator.ray_actor.membership import Membership, StepKey
from aggregator.ray_actor.messages import Charter, Joined, JoinRequest, Receipt, Refused, State
from aggregator.ray_actor.notices import joined, late, left, restarted
from aggregator.ray_actor.placing import ROOT, Plan, plan_relays
from aggregator.ray_actor.status import ActorStatus
from aggregator.ray_actor.window import Arrival, Window
from telemetry.errors import ConfigurationError, MergeDeadlineError, PacketMalformedError, PeerLostError, RankfoldError
from telemetry.packet import Packet
from telemetry.protocol import CloseReport

__all__ = ["ORPHAN_S", "Root"]

# Nobody has been heard of for so long: the job is gone, and took no leave.
ORPHAN_S: Final = 600.0
# For the ranks to fetch the report after the close.
_FAREWELL_S: Final = 30.0
_TICK_S: Final = 5.0

StartRelays = Callable[[Plan], None]


class Root:
    """One incarnation of the actor of one attempt."""

    def __init__(
        self,
        mark: Mark,
        fan_in: int,
        start_relays: StartRelays = lambda plan: None,
        end_process: Callable[[], None] = lambda: None,
        *,
        orphan_s: float = ORPHAN_S,
        pickle_charter: Callable[[Charter], bytes] = lambda charter: b"",
    ) -> None:
        """Wait for ranks.

        Args:
            mark: whose record it will be, without the job, which rank zero tells.
            fan_in: most packets of a step that an actor hears.
            start_relays: starts the relays of a plan, or finds them; called on the writing thread.
            end_process: ends the process of this actor for good.
            orphan_s: how long no rank may be heard of before the record is closed without them.
            pickle_charter: makes of a charter what ranks keep.
        """
        self._mark, self._fan_in = mark, fan_in
        self._start_relays, self._end_process = start_relays, end_process
        self._orphan_s, self._pickle_charter = orphan_s, pickle_charter
        self._incarnation = uuid4().hex
        self._begun = self._heard = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "rankfold-record")
        self._loop = asyncio.get_running_loop()
        self._meeting = Meeting()
        self._verdict: asyncio.Future[Refused | None] = self._loop.create_future()
        self._deciding = False
        self._charter: Charter | None = None
        self._charter_bytes = b""
        self._ledger: Ledger | None = None
        self._plan = Plan((), {})
        self._members = Membership()
        self._tokens: dict[int, str] = {}
        self._window = Window(self._members, float("inf"))
        self._wake = asyncio.Event()
        self._failure: RankfoldError | None = None
        self._closing = Closing(0.0)
        self._abandoned = 0
        self._is_ended = False
        self._report: dict[str, Any] | None = None
        self._fetched: set[int] = set()
        self._last_write_s = 0.0
        self._task = self._loop.create_task(self._run())

    # Attach.

    async def join(self, request: JoinRequest) -> Joined | Refused:
        """Take a rank in; returns when all ranks have come, at once if they had."""
        self._heard = time.monotonic()
        if not self._verdict.done():
            self._meeting.add(request)
            if not self._deciding and (request.is_agreed or self._meeting.is_complete):
                self._deciding = True
                await self._decide(request)
            elif len(self._meeting.requests) == 1:
                self._loop.call_later(request.attach_s, self._give_up_meeting, request.attach_s)
        refused = await asyncio.shield(self._verdict)
        return refused or await self._admit(request)

    def _give_up_meeting(self, waited_s: float) -> None:
        if not self._verdict.done() and not self._deciding:
            self._deciding = True
            self._loop.create_task(self._decide(None, waited_s))

    async def _decide(self, request: JoinRequest | None, waited_s: float = 0.0) -> None:
        refused = None
        try:
            await self._on_thread(self._open, request, waited_s)
        except RankfoldError as error:
            refused = Refused(error)
        except Exception as error:
            text = f"the actor cannot open the record: {type(error).__name__}: {error}"
            refused = Refused(RankfoldError(text, rank=0))
        if refused is not None:
            self._failure = refused.error
        self._verdict.set_result(refused)
        self._wake.set()

    def _open(self, request: JoinRequest | None, waited_s: float) -> None:
        """On the writing thread: agree, or believe a rank that has agreed, and open the record."""
        if request is not None and request.is_agreed:
            charter, sites = read_charter(request.charter), Ballot.from_wire(request.ballot).sites
        else:
            charter, sites = self._meeting.decide(waited_s)
        mark = replace(self._mark, job=charter.job, incarnation=self._incarnation)
        ledger = Ledger(mark, self._wake_from_thread)
        ledger.open(charter.offer, sites)
        self._plan = plan_relays(charter.nodes, self._fan_in)
        self._start_relays(self._plan)
        self._charter, self._charter_bytes = charter, self._pickle_charter(charter)
        durable = ledger.own.durable if ledger.own else {}
        self._members = Membership(charter.nodes)
        self._window = Window(self._members, charter.offer.deadlines.merge_s, durable)
        self._closing = Closing(charter.offer.deadlines.close_s)
        if ledger.own is not None:
            ledger.notice(restarted())
        self._ledger = ledger

    async def _admit(self, request: JoinRequest) -> Joined | Refused:
        assert self._ledger is not None, "a verdict that is no refusal has opened the record"
        assert self._ledger.reply is not None
        assert self._charter is not None
        rank = request.rank
        if self._report is not None and not request.is_agreed:
            return Refused(
                ConfigurationError(
                    f"the attempt {self._mark.attempt!r} of {self._mark.name} has closed its record",
                    rank=rank,
                    remedy="give every attempt a name of its own, or leave `attempt` out",
                )
            )
        if rank not in self._members or (rank in self._tokens and self._tokens[rank] != request.token):
            if refusal := newcomer_refusal(request, self._charter):
                return Refused(refusal)
            self._members.join(rank, self._window.newest)
            self._ledger.notice(joined(rank, self._window.newest))
        if self._tokens.get(rank) != request.token:
            await self._on_thread(self._ledger.add_sites, Ballot.from_wire(request.ballot).sites)
            self._tokens[rank] = request.token
        target = self._plan.targets.get(rank, ROOT)
        return Joined(self._ledger.reply, self._charter_bytes, target, self._incarnation)

    # Steps.

    async def deliver(self, data: bytes, previous: StepKey | None) -> Receipt:
        """Take a packet; returns when it is durable, or when it is known that it never will be.

        Args:
            data: a packet of one rank, or of several that a relay has merged.
            previous: the step that the sender had sent before this one.
        """
        now = self._heard = time.monotonic()
        if self._failure is not None or self._report is not None:
            return self._stopped()
        try:
            packet = Packet.from_bytes(data)
            if not self._verdict.done() or any(rank not in self._tokens for rank in packet.ranks):
                return Receipt(State.UNKNOWN)
            self._require_fitting(packet)
        except RankfoldError as error:
            return Receipt(State.STOPPED, error=error)
        ack: asyncio.Future[Receipt] = self._loop.create_future()
        arrival = self._window.add(packet, previous, ack, now)
        self._wake.set()
        if arrival in (Arrival.NEW, Arrival.REPEATED):
            return await ack
        if arrival is Arrival.LATE and self._ledger is not None:
            self._ledger.notice(late(packet))
        return Receipt(_STATES[arrival], self._account)

    def _require_fitting(self, packet: Packet) -> None:
        assert self._ledger is not None, "a rank is known only once the record is open"
        assert self._charter is not None
        reply = self._ledger.reply
        assert reply is not None
        if packet.run_id != reply.run_id or packet.segment < reply.segment:
            raise PacketMalformedError(
                f"ranks {list(packet.ranks)} brought run {packet.run_id} segment {packet.segment}, "
                f"this is run {reply.run_id} segment {reply.segment}",
                step=packet.step,
            )
        if packet.descriptor != self._charter.offer.descriptor:
            raise PacketMalformedError("the histograms are not on the grid that all ranks agreed on", step=packet.step)

    def _stopped(self) -> Receipt:
        error = self._failure or MergeDeadlineError("the record was closed before this rank closed")
        return Receipt(State.STOPPED, self._account, error)

    @property
    def _account(self) -> Account | None:
        return self._ledger.account if self._ledger else None

    # The close.

    async def close(self, rank: int, last: StepKey | None, num_abandoned: int) -> dict[str, Any] | None:
        """Expect nothing from a rank after step ``last``; returns the report once all ranks have closed.

        A rank that leaves while others go on gets the account so far. None says that this incarnation does not know the
        rank: it has to join, and close again.

        Args:
            rank: that closes.
            last: the last that it has sent, None if it has sent none.
            num_abandoned: steps that it had to let go of without sending even a packet without observations.
        """
        now = self._heard = time.monotonic()
        if self._report is not None:
            return self._report
        if self._ledger is None and self._failure is not None:
            return report_to_wire(CloseReport(failure=self._failure))
        if rank not in self._tokens:
            return None
        if rank not in self._closing:
            self._abandoned += num_abandoned
        self._members.leave(rank, last)
        if last is not None:
            self._window.announce(last, now)
        waiter: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._closing.add(Closer(rank, last, self._window.newest, waiter), now)
        self._window.hurry(self._closing.deadline)
        self._wake.set()
        return await waiter

    async def farewell(self, rank: int) -> None:
        """Note that a rank has its report; when all have, the process ends."""
        self._fetched.add(rank)
        self._wake.set()

    async def end(self, reason: str) -> dict[str, Any]:
        """Close the record without waiting for anybody; for whoever knows that the ranks are gone."""
        if self._report is None and self._ledger is not None:
            self._failure = self._failure or PeerLostError(
                f"the attempt was ended: {reason}", remedy="look into the logs of the ranks for why they ended"
            )
            self._is_ended = True
            self._window.hurry(0.0)
            self._wake.set()
            while self._report is None:
                await asyncio.sleep(0.02)
        return self._report or report_to_wire(CloseReport(failure=self._failure))

    async def beat(self, rank: int) -> str:
        """Note that a rank is alive; returns the incarnation, by which it notices a restart."""
        self._heard = time.monotonic()
        return self._incarnation if rank in self._tokens else ""

    # The loop.

    async def _run(self) -> None:
        try:
            await self._serve()
        except Exception as error:
            self._stop(_unexpected(error))
            self._answer_closers(report_to_wire((self._account or Account()).report(self._failure)))
        if not self._is_ended:
            await self._wait_for_farewells()
        self._end_process()

    async def _serve(self) -> None:
        while self._report is None:
            wait_s = self._next_wait_s()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait_s)
            self._wake.clear()
            if self._verdict.done() and self._ledger is not None:
                await self._write_due()
                await self._answer_leavers()
                await self._close_if_over()
            elif self._failure is not None and time.monotonic() - self._heard > _FAREWELL_S:
                break
            if time.monotonic() - self._heard > self._orphan_s:
                await self._give_up_orphan()

    def _next_wait_s(self) -> float:
        deadline = min(self._window.next_deadline(), self._closing.deadline)
        return max(0.0, min(_TICK_S, deadline - time.monotonic())) + 0.001

    async def _write_due(self) -> None:
        """Hand what is due to the record, and answer for what has become durable."""
        assert self._ledger is not None, "steps are due only once the record is open"
        while due := self._window.pop_due(time.monotonic()):
            sizes = [len(self._members.expected(step.key) | step.ranks) for step in due]
            await self._write(self._ledger.append, due, sizes, time.monotonic())
        if self._window.num_writing:
            await self._write(self._ledger.settle)

    async def _write(self, write: Callable[..., list[Written]], *args: Any) -> None:
        assert self._ledger is not None
        begun = time.monotonic()
        try:
            self._acknowledge(await self._on_thread(write, *args))
        except Exception as error:
            self._acknowledge(await self._on_thread(self._ledger.flush))
            self._stop(error if isinstance(error, RankfoldError) else _unexpected(error))
        self._last_write_s = time.monotonic() - begun

    def _wake_from_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._wake.set)

    def _acknowledge(self, written: Sequence[Written]) -> None:
        receipt = Receipt(State.DURABLE, self._account)
        for step in written:
            for ack in self._window.settle(step.key, step.absent):
                _resolve(ack, receipt)

    def _stop(self, error: RankfoldError) -> None:
        self._failure = self._failure or error
        receipt = self._stopped()
        for ack in self._window.drop_all():
            _resolve(ack, receipt)

    async def _answer_leavers(self) -> None:
        if self._ledger is None or not self._members.open_ranks:
            return
        for closer in self._closing.pop_leavers(self._window.newest):
            self._ledger.notice(left(closer.rank, closer.last))
            report = await self._on_thread(self._ledger.report, self._failure)
            _resolve(closer.waiter, report_to_wire(report))
            self._fetched.add(closer.rank)
        self._window.hurry(self._closing.deadline)

    async def _close_if_over(self) -> None:
        still_open = self._members.open_ranks
        # Who missed a deadline is not waited for at the close either.
        is_last = self._closing.has_begun and still_open <= self._members.silent
        have_closed = is_last and not self._window.num_pending
        if self._is_ended or have_closed or time.monotonic() >= self._closing.deadline:
            missing = dict.fromkeys(still_open, "did not close")
            errors = [MergeDeadlineError(text, rank=rank) for rank, text in missing.items()]
            await self._finish(self._failure or merge_stopped(errors, missing, None), missing)
        elif self._failure is not None and self._closing.has_begun:
            await self._finish(self._failure, self._failure.failures)

    async def _finish(self, failure: RankfoldError | None, missing: Mapping[int, str]) -> None:
        assert self._ledger is not None
        await self._write_due()
        deadline_s, failure = 0.4 * self._closing.close_s, self._failure or failure
        report, written = await self._on_thread(self._ledger.close, deadline_s, failure, missing)
        self._acknowledge(written)
        wire = report_to_wire(report)
        wire["num_abstained"] += self._abandoned
        self._failure = self._failure or report.failure
        self._answer_closers(wire)
        self._stop(self._failure or MergeDeadlineError("the record is closed"))

    def _answer_closers(self, report: dict[str, Any]) -> None:
        self._report = report
        for closer in self._closing.pop_all():
            _resolve(closer.waiter, report)

    async def _give_up_orphan(self) -> None:
        if self._ledger is None:
            self._end_process()
            return
        self._failure = self._failure or PeerLostError(f"no rank was heard of for {self._orphan_s:g} s")
        self._is_ended = True
        self._window.hurry(0.0)
        await self._close_if_over()

    async def _wait_for_farewells(self) -> None:
        deadline = time.monotonic() + _FAREWELL_S
        while not set(self._tokens) <= self._fetched and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _on_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._loop.run_in_executor(self._thread, function, *args)

    # Looking at it.

    async def status(self) -> ActorStatus:
        """Return what there is to see."""
        now, ledger = time.monotonic(), self._ledger
        reply = ledger.reply if ledger else None
        return ActorStatus(
            name=self._mark.name,
            attempt=self._mark.attempt,
            job=self._charter.job if self._charter else "",
            state=self._state(),
            directory=self._charter.offer.to if self._charter else None,
            run_id=reply.run_id if reply else None,
            segment=reply.segment if reply else None,
            host=socket.gethostname(),
            pid=os.getpid(),
            up_s=now - self._begun,
            num_ranks=len(self._members.open_ranks) if ledger else self._meeting.world_size,
            num_joined=len(self._tokens) if ledger else len(self._meeting.requests),
            num_relays=len(self._plan.relays),
            silent_ranks=sorted(self._members.silent),
            newest_step=self._window.newest[1] if self._window.newest else None,
            num_pending_steps=self._window.num_pending + self._window.num_writing,
            num_pending_packets=self._window.num_parts,
            oldest_wait_s=self._window.oldest_wait_s(now),
            last_write_s=self._last_write_s,
            num_repeated=self._window.num_repeated,
            num_late=self._window.num_late,
            account=ledger.account if ledger else Account(),
            failure=str(self._failure or ""),
        )

    def _state(self) -> str:
        if self._report is not None:
            return "closed"
        if self._failure is not None:
            return "stopped"
        if self._closing.has_begun:
            return "closing"
        return "merging" if self._ledger is not None and self._verdict.done() else "gathering"


_STATES: Final = {Arrival.DURABLE: State.DURABLE, Arrival.LATE: State.LATE, Arrival.CROSSING: State.CROSSING}


def _resolve(waiter: asyncio.Future[Any], value: Any) -> None:
    if not waiter.done():
        waiter.set_result(value)


def _unexpected(error: Exception) -> RankfoldError:
    return RankfoldError(
        f"merging failed in the actor: {type(error).__name__}: {error}",
        remedy="report this with the traceback; training goes on, nothing more is recorded",
    )
