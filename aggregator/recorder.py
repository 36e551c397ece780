"""What the root of the merge does with a run: claim the directory, commit each step, then show it.

The record comes first: a sink is handed a step only after the step is durable, so nothing that a tracker shows is
missing from the record.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from aggregator.catalogue import MergedStep
from aggregator.history.writer import HistoryWriter
from aggregator.sinks.protocol import RunInfo
from aggregator.sinks.runner import SinkRunner, require_valid_sinks
from telemetry.errors import RankfoldError
from telemetry.protocol import AttachOffer, AttachReply, SinkReport

__all__ = ["Recorder"]


class Recorder:
    """One run on the one process that writes it: rank zero of the collective backend, or the root actor.

    Calls come from one thread at a time: :meth:`claim` once, :meth:`commit` in ascending order of steps, then
    :meth:`close` or :meth:`abort`.
    """

    def __init__(self) -> None:
        self._writer: HistoryWriter | None = None
        self._sinks: SinkRunner | None = None

    def claim(self, offer: AttachOffer) -> AttachReply:
        """Take the run directory ``offer.to`` and begin to open the sinks in the background.

        Args:
            offer: of rank zero; ``to`` is a directory.

        Raises:
            SinkDuplicateError, ConfigurationError: a sink cannot be used; nothing was written.
            RunDirectoryInUseError, RunDirectoryForeignError, RunDirectoryMissingRunError, RunDirectoryUnwritableError,
            SketchDescriptorMismatchError: see :meth:`aggregator.history.HistoryWriter.create`.
        """
        sinks = require_valid_sinks(offer.sinks)
        writer = HistoryWriter.create(Path(offer.to), offer.run, offer.descriptor, offer.resume_step)
        self._writer = writer
        run = RunInfo(
            run_id=writer.run_id,
            segment=writer.segment,
            resume_step=writer.resume_step,
            world_size=offer.world_size,
            descriptor=offer.descriptor,
            run=offer.run,
        )
        self._sinks = SinkRunner(sinks, run)
        return AttachReply(writer.run_id, writer.segment)

    def commit(self, step: MergedStep) -> None:
        """Make a step durable, then queue it for the sinks; does not wait for them.

        Raises:
            HistoryWriteError, WriterFencedError, StepOrderError: see :meth:`aggregator.history.HistoryWriter.commit`;
                what was committed before stays readable, and no sink saw the step.
        """
        writer, sinks = self._claimed()
        writer.commit(step)
        sinks.emit(step)

    def close(self, deadline_s: float) -> tuple[SinkReport, ...]:
        """Seal the segment, let the sinks finish within ``deadline_s`` seconds, and say what became of each.

        Raises:
            HistoryWriteError, WriterFencedError: the segment could not be sealed; the sinks were still closed, and a
                second call returns their reports.
        """
        writer, sinks = self._claimed()
        try:
            writer.close()
        finally:
            reports = sinks.close(deadline_s)
        return reports

    def abort(self) -> None:
        """Give the run up: after a refusal on another rank, or a failed merge.

        What was committed stays, unsealed. A claim without a commit is taken back, so that the next attempt finds the
        directory as it was. Never raises, does not wait for sinks.
        """
        if self._sinks is not None:
            self._sinks.close(0.0)
        if self._writer is None:
            return
        if self._writer.num_commits == 0:
            with suppress(RankfoldError):
                self._writer.withdraw()
        self._writer.abandon()

    def _claimed(self) -> tuple[HistoryWriter, SinkRunner]:
        assert self._writer is not None, "claim comes first"
        assert self._sinks is not None, "sinks are made by claim"
        return self._writer, self._sinks
