"""The merge of one rank: step after step, collect from below, send up, pass the answer down, until the close.

Only the thread that drives it acts; everything that happens reaches it as an event. It works on while the training
thread hangs, so a rank that hangs is missing from a step, and its children are not.
"""

from __future__ import annotations

from typing import Any

from aggregator.collective.absence import cut_off
from aggregator.collective.account import Account, report_from_wire, report_to_wire
from aggregator.collective.frames import Frame, FrameKind
from aggregator.collective.inbox import Broken, CloseRequested, Event, Received, Recorded, Submitted
from aggregator.collective.record import Record
from aggregator.collective.round import Brought, Closed, Contribution, merge_round
from aggregator.collective.sources import Sources
from aggregator.collective.waiting import Member, Waiting
from telemetry.errors import MergeDeadlineError, PeerLostError, RankfoldError
from telemetry.protocol import CloseReport

__all__ = ["Coordinator"]


class _MergingStoppedError(Exception):
    """Merging ends here for ``error``; ``tell`` if the neighbours have yet to learn it."""

    def __init__(self, error: RankfoldError, *, tell: bool) -> None:
        super().__init__(str(error))
        self.error, self.tell = error, tell


class Coordinator:
    """Merges the steps of one rank and its subtree after the ranks have agreed.

    Attributes:
        failure: why merging has stopped, or None; read by the training thread.
        num_settled: steps of this rank that are merged, durable or not; read by the training thread.
        account: totals of the durable steps, as far as this rank has been told.
    """

    def __init__(self, member: Member, record: Record | None) -> None:
        """Take the place of one rank; ``record`` is given on rank zero and nowhere else."""
        self.failure: RankfoldError | None = None
        self.num_settled = 0
        self.account = Account()
        self._position, self._waits = member.position, member.waits
        self._neighbours, self._clock, self._record = member.neighbours, member.clock, record
        self._sources = Sources((self._position.rank, *self._position.children))
        self._closed_at: float | None = None
        self._report: CloseReport | None = None

    def serve(self) -> Waiting[CloseReport]:
        """Merge until this rank closes; never raises. Returns the account of the run."""
        try:
            return (yield from self._merge_until_closed())
        except _MergingStoppedError as stopped:
            failure, tell = stopped.error, stopped.tell
        except RankfoldError as error:
            failure, tell = error, True
        except Exception as error:
            failure, tell = self._unexpected(error), True
        if self._record is not None:
            self._record.flush()
        self.failure = failure
        if tell:
            self._tell_neighbours(failure)
        return (yield from self._wait_to_close(failure))

    def _merge_until_closed(self) -> Waiting[CloseReport]:
        for child in self._position.children:
            if not self._neighbours.is_alive(child):
                self._take_broken(Broken(child, "its connection ended during attach"))
        while True:
            contributions = yield from self._collect()
            outcome = merge_round(self._position, contributions)
            if isinstance(outcome, Closed):
                return (yield from self._conclude(outcome))
            yield from self._settle(outcome)
            self.num_settled += isinstance(contributions[self._position.rank], Brought)

    # One round: wait for this rank and its children.

    def _collect(self) -> Waiting[dict[int, Contribution]]:
        step_at: float | None = None
        while waiting := self._sources.waiting():
            if step_at is None and self._sources.has_step():
                step_at = self._clock()
            event = yield self._earliest(None if step_at is None else step_at + self._waits.round_s)
            if event is None:
                self._give_up(waiting)
            elif (frame := self._take(event)) is not None:
                self._overrule(frame)
        return self._sources.pop_round()

    def _earliest(self, deadline: float | None) -> float | None:
        """Bound a wait by the close, once this rank has begun to close."""
        if self._closed_at is None:
            return deadline
        closing = self._closed_at + self._waits.close_rounds_s
        return closing if deadline is None else min(deadline, closing)

    def _give_up(self, late: list[int]) -> None:
        waited = "before this rank closed" if self._closed_at else f"within {self._waits.round_s:g} s"
        for source in late:
            text = f"brought nothing {waited}"
            self._sources.lose(source, text, MergeDeadlineError(text, rank=source))

    # What happens meanwhile.

    def _take(self, event: Event) -> Frame | None:
        """Act on an event. Returns what the parent said, if it was that.

        Raises:
            PeerLostError: the parent is lost.
            _MergingStoppedError: the parent says stop.
        """
        if isinstance(event, Submitted):
            self._sources.add(self._position.rank, Brought(event.packet, came_at=event.at))
        elif isinstance(event, CloseRequested):
            self._closed_at = event.at
            self._sources.add(self._position.rank, Closed())
        elif isinstance(event, Broken):
            self._take_broken(event)
        elif isinstance(event, Recorded):
            self._take_recorded()
        elif event.peer != self._position.parent:
            self._take_from_child(event.peer, event.frame)
        elif event.frame.kind is FrameKind.STOP:
            raise _MergingStoppedError(RankfoldError.from_wire(event.frame.body), tell=True)
        elif event.frame.kind is FrameKind.DURABLE:
            self._pass_account(event.frame)
        else:
            return event.frame
        return None

    def _take_recorded(self) -> None:
        """Tell of what is durable once nothing is pending; meanwhile the answers to the next steps tell it."""
        assert self._record is not None, "only rank zero has a recorder"
        self._record.settle()
        if self._record.is_settled and self._record.account != self.account:
            self._pass_account(Frame(FrameKind.DURABLE, {"account": self._record.account.to_wire()}))

    def _take_broken(self, event: Broken) -> None:
        self._neighbours.forget(event.peer)
        text = f"is lost: {event.reason}"
        if event.peer == self._position.parent:
            raise cut_off(PeerLostError, event.peer, text, self.account.last_committed_step)
        self._sources.lose(event.peer, text, PeerLostError(text, rank=event.peer))

    def _take_from_child(self, child: int, frame: Frame) -> None:
        try:
            if frame.kind is FrameKind.STEP:
                self._sources.add(child, Brought.from_frame(frame, self._clock()))
            elif frame.kind is FrameKind.CLOSE:
                self._sources.add(child, Closed.from_frame(frame))
            elif frame.kind is FrameKind.STOP:
                raise RankfoldError.from_wire(frame.body)
        except RankfoldError as error:
            self._sources.lose(child, error.message, error)

    # One step: up, and the answer down.

    def _settle(self, outcome: Brought) -> Waiting[None]:
        """Bring a step into the record, or to the parent.

        Raises:
            _MergingStoppedError: this step was the last.
        """
        if self._record is None:
            self._pass_ack((yield from self._ask_parent(outcome)))
        else:
            self._pass_ack(self._append(outcome, self._record))

    def _pass_account(self, frame: Frame) -> None:
        self.account = Account(**frame.body["account"])
        self._neighbours.send_down(frame)

    def _pass_ack(self, ack: Frame) -> None:
        self._pass_account(ack)
        if ack.body["failure"] is not None:
            raise _MergingStoppedError(RankfoldError.from_wire(ack.body["failure"]), tell=False)

    def _append(self, outcome: Brought, record: Record) -> Frame:
        """Hand a step to the recorder; its answer says that it is merged, and which steps are durable."""
        failure = outcome.error
        try:
            record.append(outcome, self._clock() - outcome.came_at)
        except RankfoldError as error:
            failure = error
        if failure is not None:
            record.flush()
        body = {
            "step": outcome.packet.step,
            "account": record.account.to_wire(),
            "failure": failure and failure.to_wire(),
        }
        return Frame(FrameKind.ACK, body)

    def _ask_parent(self, outcome: Brought) -> Waiting[Frame]:
        self._neighbours.send_up(outcome.to_frame())
        return (yield from self._hear(FrameKind.ACK, self._waits.ack_s, f"answer step {outcome.packet.step}"))

    def _hear(self, kind: FrameKind, timeout_s: float, what: str) -> Waiting[Frame]:
        """Wait for a frame of the parent; an answer that merging has stopped ends every other wait, too."""
        begun = self._clock()
        while True:
            deadline = begun + timeout_s
            if self._closed_at is not None:
                deadline = min(deadline, self._closed_at + self._waits.close_report_s)
            event = yield deadline
            if event is None:
                raise self._silent_parent(what, self._clock() - begun)
            frame = self._take(event)
            if frame is None:
                continue
            if frame.kind is kind:
                return frame
            self._overrule(frame)

    def _overrule(self, frame: Frame) -> None:
        """Take an answer this rank has not asked for: those above went on without it, or without its close."""
        if frame.kind is FrameKind.ACK:
            self._pass_ack(frame)
        elif frame.kind is FrameKind.REPORT:
            self._report = self._pass_report(frame)
            raise _MergingStoppedError(self._report.failure or self._closed_without(), tell=False)

    def _closed_without(self) -> RankfoldError:
        return MergeDeadlineError("rank zero closed the record before this rank closed", rank=self._position.rank)

    def _silent_parent(self, what: str, waited_s: float) -> RankfoldError:
        parent = self._position.parent
        assert parent is not None, "the root hears nobody"
        self._neighbours.forget(parent)
        reason = f"did not {what} within {waited_s:.3g} s"
        return cut_off(MergeDeadlineError, parent, reason, self.account.last_committed_step)

    # The end.

    def _conclude(self, outcome: Closed) -> Waiting[CloseReport]:
        """Close after every rank that is left has closed."""
        if self._record is not None:
            return self._write_report(self._record, outcome.error, outcome.missing)
        self._neighbours.send_up(outcome.to_frame())
        report = yield from self._hear(FrameKind.REPORT, self._waits.close_report_s, "report the close")
        return self._pass_report(report)

    def _write_report(self, record: Record, failure: RankfoldError | None, missing: Any) -> CloseReport:
        report = record.close(self._waits.close_recorder_s, failure, missing)
        self.failure = self.failure or report.failure
        self._neighbours.send_down(Frame(FrameKind.REPORT, report_to_wire(report)))
        return report

    def _pass_report(self, frame: Frame) -> CloseReport:
        self._neighbours.send_down(frame)
        report = report_from_wire(frame.body)
        self.failure = self.failure or report.failure
        return report

    def _tell_neighbours(self, failure: RankfoldError) -> None:
        frame = Frame(FrameKind.STOP, failure.to_wire())
        if self._record is None:
            self._neighbours.send_up(frame)
        elif self._record.account != self.account:
            self._pass_account(Frame(FrameKind.DURABLE, {"account": self._record.account.to_wire()}))
        self._neighbours.send_down(frame)

    def _wait_to_close(self, failure: RankfoldError) -> Waiting[CloseReport]:
        """Wait, after merging has stopped, for this rank to close, and then shortly for the account of rank zero."""
        # A rank that left before the others does not wait for them to end.
        has_left = self._closed_at is not None and self._position.rank in failure.failures
        while True:
            if self._closed_at is not None:
                if self._record is not None:
                    return self._write_report(self._record, failure, failure.failures)
                if self._report is not None or has_left or not self._can_hear_root():
                    break
            deadline = None if self._closed_at is None else self._closed_at + self._waits.close_report_s
            event = yield deadline
            if event is None:
                break
            if isinstance(event, CloseRequested):
                self._closed_at = event.at
            elif isinstance(event, Broken):
                self._neighbours.forget(event.peer)
            elif isinstance(event, Received) and event.frame.kind is FrameKind.REPORT:
                self._report = self._pass_report(event.frame)
        return self._report or self.account.report(failure, failure.failures)

    def _can_hear_root(self) -> bool:
        parent = self._position.parent
        return parent is not None and self._neighbours.is_alive(parent)

    def _unexpected(self, error: Exception) -> RankfoldError:
        return RankfoldError(
            f"merging failed on rank {self._position.rank}: {type(error).__name__}: {error}",
            rank=self._position.rank,
            remedy="report this with the traceback; training goes on, nothing more is recorded",
        )
