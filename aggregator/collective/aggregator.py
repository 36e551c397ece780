"""The side of the collective merge that the training thread touches."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait

from aggregator.collective.absence import attach_timeout
from aggregator.collective.agreement import agree
from aggregator.collective.coordinator import Coordinator
from aggregator.collective.inbox import CloseRequested, Inbox, Recorded, Submitted
from aggregator.collective.neighbours import Neighbours
from aggregator.collective.record import Record
from aggregator.collective.recording import RecorderFactory, default_recorder
from aggregator.collective.transport import Rendezvous
from aggregator.collective.tree import require_fan_in
from aggregator.collective.waiting import Member, drive
from aggregator.collective.waits import Waits
from telemetry.errors import MergeDeadlineError, RankfoldError
from telemetry.packet import Packet
from telemetry.protocol import AttachOffer, AttachReply, CloseReport

__all__ = ["CollectiveAggregator"]

# Beyond the deadlines of the merging thread, for it to end its links.
_MARGIN_S = 3.0


class CollectiveAggregator:
    """Merges over the ranks of the job's own process group and writes a run directory on rank zero.

    Implements ``telemetry.protocol.Aggregator``. A world of one takes the same path and needs no process group.

    Example:
        >>> CollectiveAggregator(fan_in=8).failure is None
        True
    """

    def __init__(
        self,
        recorder_factory: RecorderFactory = default_recorder,
        fan_in: int = 16,
        max_in_flight: int = 8,
        host: str | None = None,
    ) -> None:
        """Make an aggregator that is not attached yet.

        Args:
            recorder_factory: makes the writer of the record; called on rank zero, once all ranks agree.
            fan_in: most children of a rank in the tree; the same on all ranks.
            max_in_flight: submitted steps that are not merged; beyond, a rank sends its steps without observations.
            host: name of the machine, found if None; ranks that give the same one meet each other before any other.
        """
        self._recorder_factory = recorder_factory
        self._fan_in = fan_in
        self._max_in_flight = max_in_flight
        self._host = host
        self._num_submitted = 0
        self._inbox = Inbox()
        self._coordinator: Coordinator | None = None
        self._thread: threading.Thread | None = None
        self._close_s = 0.0
        self._refusal: RankfoldError | None = None
        self._report: CloseReport | None = None
        self._final_report: CloseReport | None = None

    def attach(self, offer: AttachOffer) -> AttachReply:
        """Agree with all ranks; see ``telemetry.protocol.Aggregator.attach``.

        Raises:
            ProcessGroupMissingError: several ranks, but no process group.
            AttachTimeoutError: names the ranks that did not come within ``attach_s``.
            RankfoldError: any rank's refusal, on all ranks, with ``failures``.
        """
        try:
            return self._attach(offer)
        except RankfoldError as error:
            self._refusal = error
            raise

    def _attach(self, offer: AttachOffer) -> AttachReply:
        require_fan_in(self._fan_in)
        rendezvous = Rendezvous(offer.rank, offer.world_size, offer.deadlines.attach_s)
        position = rendezvous.find_place(self._fan_in, self._host)
        waits = Waits(position, offer.deadlines)
        links = rendezvous.connect(self._inbox.on_frame, self._inbox.on_broken, waits)
        member = Member(position, waits, Neighbours(position, links))
        is_root = position.parent is None
        record = Record(self._recorder_factory, lambda: self._inbox.put(Recorded())) if is_root else None
        coordinator = Coordinator(member, record)
        reply: Future[AttachReply] = Future()

        def run() -> None:
            try:
                agreed = drive(agree(offer, member, record, rendezvous.missing), self._inbox)
                rendezvous.finish()
            except Exception as error:
                # First the links: the refusal must have left before it is raised and perhaps ends this process.
                member.neighbours.close(waits.goodbye_s)
                reply.set_exception(error)
                return
            reply.set_result(agreed)
            self._report = drive(coordinator.serve(), self._inbox)
            member.neighbours.close(waits.goodbye_s)

        self._thread = threading.Thread(target=run, name="rankfold-merge", daemon=True)
        self._close_s = offer.deadlines.close_s
        self._thread.start()
        # Not reply.result(timeout): an AttachTimeoutError is a TimeoutError, too.
        if not wait([reply], waits.verdict_s + waits.offers_s).done:
            raise attach_timeout(offer.rank, {0: "gave no verdict"})
        agreed = reply.result()
        self._coordinator = coordinator
        if record is not None:
            record.guard()
        return agreed

    def submit(self, packet: Packet) -> None:
        """Queue a logged step; returns at once and never raises.

        The packet is sent without its observations, but still sent, if ``max_in_flight`` steps are not merged.
        """
        coordinator = self._coordinator
        if coordinator is None or coordinator.failure is not None:
            return
        if self._num_submitted - coordinator.num_settled >= self._max_in_flight:
            packet = packet.abstaining(f"too many steps in flight: {self._max_in_flight} are not merged yet")
        self._num_submitted += 1
        self._inbox.put(Submitted(packet, time.monotonic()))

    @property
    def failure(self) -> RankfoldError | None:
        """Why merging has stopped, or None while it runs."""
        return self._refusal if self._coordinator is None else self._coordinator.failure

    def close(self) -> CloseReport:
        """Flush, end the merging thread and its links, and account for the run.

        Bounded by ``close_s`` and a few seconds, whatever the other ranks do; a second call returns the same report.
        """
        coordinator, thread = self._coordinator, self._thread
        if coordinator is None or thread is None:
            return CloseReport(failure=self._refusal)
        if self._final_report is None:
            self._inbox.put(CloseRequested(time.monotonic()))
            thread.join(self._close_s + _MARGIN_S)
            self._final_report = self._report or coordinator.account.report(
                coordinator.failure or _merge_stuck(self._close_s)
            )
        return self._final_report


def _merge_stuck(close_s: float) -> MergeDeadlineError:
    return MergeDeadlineError(
        f"the merging thread did not end within {close_s:g} s of the close",
        remedy="look at the storage of the run on rank zero, or raise deadlines.close_s",
    )
