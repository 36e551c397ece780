"""What the root of the merge does with a run: claim the directory, check and append each step, show what is durable.

The record comes first: a sink is handed a step only after the step is durable, so nothing that a tracker shows is
missing from the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from aggregator.catalogue import MergedStep
from aggregator.health import HealthMonitor, Thresholds
from aggregator.history.destination import SegmentWriter, open_destination
from aggregator.history.group import GroupCommit
from aggregator.history.termination import settle_at_sigterm
from aggregator.sinks.protocol import RunInfo
from aggregator.sinks.runner import SinkRunner, require_valid_sinks
from telemetry.errors import ConfigurationError, RankfoldError
from telemetry.protocol import AttachOffer, AttachReply, SinkReport

__all__ = ["Recorder"]


class Recorder:
    """One run on the one process that writes it: rank zero of the collective backend, or the root actor.

    Calls come from one thread at a time: :meth:`claim` once, :meth:`append` in ascending order of steps within a
    segment, then :meth:`close` or :meth:`abort`. Only :meth:`guard` belongs to the main thread.
    """

    def __init__(self, group: GroupCommit | None = None, after: int | None = None) -> None:
        """Make a recorder that has claimed nothing.

        Args:
            group: how long steps may wait for others before they are durable.
            after: the segment to continue from, see :meth:`aggregator.history.HistoryWriter.create`.
        """
        self._group, self._after = group, after
        self._writer: SegmentWriter | None = None
        self._sinks: SinkRunner | None = None
        self._health: HealthMonitor | None = None
        self._offer: AttachOffer | None = None
        self._about: Mapping[str, Any] = {}

    def claim(self, offer: AttachOffer) -> AttachReply:
        """Take the destination ``offer.to`` and begin to open the sinks in the background.

        Args:
            offer: of rank zero; ``to`` is a directory, or a run in memory.

        Raises:
            SinkDuplicateError, ConfigurationError: a sink or ``offer.health`` cannot be used; nothing was written.
            RunDirectoryInUseError, RunDirectoryForeignError, RunDirectoryMissingRunError, RunDirectoryUnwritableError,
            SketchDescriptorMismatchError: see :meth:`aggregator.history.HistoryWriter.create`.
        """
        if offer.disabled_by:
            return self._claim_disabled(offer)
        sinks = require_valid_sinks(offer.sinks)
        thresholds = _thresholds(offer.health)
        about = {**offer.run, "health": asdict(thresholds) if thresholds else None}
        writer = open_destination(offer.to, about, offer.descriptor, offer.resume_step, self._group, self._after)
        self._writer, self._offer, self._about = writer, offer, about
        self._health = _monitor(offer)
        self._sinks = SinkRunner(sinks, self._run_info())
        return AttachReply(writer.run_id, writer.segment)

    def begin_segment(self, resume_step: int) -> int:
        """Continue the run in the same directory with a new segment: make durable what is pending, and seal.

        The built-in checks begin anew. The sinks learn of it between the last step before and the first one after.

        Args:
            resume_step: first step of the new segment; what the earlier ones hold from it on is superseded.

        Returns:
            The number of the new segment: one more than that of the last.

        Raises:
            HistoryWriteError, WriterFencedError, RunDirectoryInUseError, RunDirectoryUnwritableError: see
                :meth:`aggregator.history.HistoryWriter.next_segment`; nothing more can be appended.
        """
        assert self._offer is not None, "a run that is not recorded has no segments"
        assert self._sinks is not None, "sinks are made by claim"
        self._writer = self._claimed().next_segment(self._about, self._offer.descriptor, resume_step)
        self._health = _monitor(self._offer)
        self._sinks.begin_segment(self._run_info())
        return self._writer.segment

    def _run_info(self) -> RunInfo:
        assert self._offer is not None, "claim comes first"
        writer = self._claimed()
        return RunInfo(
            run_id=writer.run_id,
            segment=writer.segment,
            resume_step=writer.resume_step,
            world_size=self._offer.world_size,
            descriptor=self._offer.descriptor,
            run=self._about,
        )

    def _claim_disabled(self, offer: AttachOffer) -> AttachReply:
        """Write a run without steps that says who turned it off. A switch that turns things off must not refuse."""
        about = {**offer.run, "health": None, "disabled_by": list(offer.disabled_by)}
        try:
            if not offer.to:
                raise ConfigurationError("no destination was given")
            self._writer = open_destination(offer.to, about, offer.descriptor, offer.resume_step)
        except RankfoldError as error:
            return AttachReply("", 0, offer.disabled_by, unrecorded=str(error))
        return AttachReply(self._writer.run_id, self._writer.segment, offer.disabled_by)

    def guard(self) -> None:
        """Make durable what is pending when the process gets SIGTERM; called on the main thread, once it has claimed.

        The handler of before is called after that. On any other thread this does nothing.
        """
        if self._sinks is not None:
            settle_at_sigterm()

    def append(self, step: MergedStep) -> Future[MergedStep]:
        """Take a step, to be written at once or with others, see :class:`aggregator.history.GroupCommit`.

        Returns:
            Resolved, on any thread and in the order of steps, once the step is durable and queued for the sinks: with
            the step as it stands in the record, the findings of the built-in checks included; or with the error that
            kept it from becoming durable: no sink sees it then, and nothing after it can be appended.

        Raises:
            HistoryWriteError, WriterFencedError, StepOrderError: see :meth:`aggregator.history.HistoryWriter.append`;
                what was committed before stays readable.
        """
        if self._health is not None:
            step = self._health.examine(step)
        acknowledgement = self._claimed().append(step)
        acknowledgement.add_done_callback(self._show)
        return acknowledgement

    @property
    def failure(self) -> RankfoldError | None:
        """Why no further step can be appended, None while one can."""
        return None if self._writer is None else self._writer.failure

    def flush(self) -> None:
        """Make durable what was appended.

        Raises:
            HistoryWriteError, WriterFencedError: as for :meth:`append`.
        """
        self._claimed().flush()

    def close(self, deadline_s: float) -> tuple[SinkReport, ...]:
        """Seal the segment, let the sinks finish within ``deadline_s`` seconds, and say what became of each.

        Raises:
            HistoryWriteError, WriterFencedError: the segment could not be sealed; the sinks were still closed, and a
                second call returns their reports.
        """
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            reports = self._sinks.close(deadline_s) if self._sinks is not None else ()
        return reports

    def abort(self) -> None:
        """Give the run up: after a refusal on another rank, or a failed merge.

        What was appended is committed if it can be, and stays, unsealed. A claim without a commit is taken back, so
        that the next attempt finds the directory as it was. Never raises, does not wait for sinks.
        """
        if self._writer is not None:
            with suppress(RankfoldError):
                self._writer.flush()
        if self._sinks is not None:
            self._sinks.close(0.0)
        if self._writer is None:
            return
        if self._writer.num_commits == 0:
            with suppress(RankfoldError):
                self._writer.withdraw()
        self._writer.abandon()

    def _claimed(self) -> SegmentWriter:
        assert self._writer is not None, "claim comes first"
        return self._writer

    def _show(self, acknowledgement: Future[MergedStep]) -> None:
        assert self._sinks is not None, "sinks are made by claim"
        if acknowledgement.exception() is None:
            self._sinks.emit(acknowledgement.result())


def _monitor(offer: AttachOffer) -> HealthMonitor | None:
    thresholds = _thresholds(offer.health)
    return HealthMonitor(thresholds, offer.sites) if thresholds else None


def _thresholds(health: object) -> Thresholds | None:
    if isinstance(health, bool):
        return Thresholds() if health else None
    if not isinstance(health, Thresholds):
        raise ConfigurationError(
            f"health is {health!r}", remedy="give True, False or an aggregator.health.Thresholds object"
        )
    return health
