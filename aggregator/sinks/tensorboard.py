"""The record in TensorBoard: scalars for what one watches, exact raw histograms for what one looks at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggregator.catalogue import MergedStep
from aggregator.sinks.bins import finite_bins
from aggregator.sinks.points import DEFAULT_FIELDS, HistogramPoint, findings_text, histogram_points
from aggregator.sinks.protocol import RunInfo, RunPlan
from aggregator.sinks.tags import ANY_PRINTABLE
from aggregator.sinks.tensorboard_checksum import speed_up
from aggregator.sinks.tensorboard_layout import LayoutBook
from aggregator.sinks.tensorboard_relay import relays
from aggregator.sinks.tracker import TrackerSink, require_library
from aggregator.strict_json import to_strict_json
from telemetry.errors import ConfigurationError, SinkUnavailableError
from telemetry.summary.fields import FINITE, FLOAT_FIELDS

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardSink"]


class TensorBoardSink(TrackerSink):
    """Writes one event file for each attempt, or into a ``SummaryWriter`` of the caller's.

    Scalars are single precision, as TensorBoard reads them; histogram counts are exact up to 2^53.

    Where wandb or clearml listens in on TensorBoard's writers, histograms are left out and the report says so, because
    a relay re-bins them; if they were asked for with ``histograms=True``, ``watch`` refuses.

    Example:
        >>> sink = TensorBoardSink("runs/exp1/tb", fields=("rms", "absmax", "nonfinite"))
    """

    name = "tensorboard"
    alphabet = ANY_PRINTABLE
    carries = frozenset({"scalar", "raw_histogram", "text", "run_metadata"})

    def __init__(
        self,
        log_dir: Path | str | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        *,
        writer: SummaryWriter | None = None,
        histograms: bool | None = None,
        layout: bool = True,
    ) -> None:
        """Name the directory; it is opened on the rank that writes the record.

        Args:
            log_dir: where event files go; several runs and attempts may share it.
            fields: which of ``telemetry.summary.SUMMARY_FIELDS`` and ``nonfinite`` become scalars. The norm of a site
                that is only sampled is an estimate and is left out; the history has it.
            writer: write into this one instead, and never close it. Needed on the rank that writes the record; the
                sink then cannot be sent to another process.
            histograms: True to be refused where they cannot be shown, False for none.
            layout: whether to describe a custom-scalars dashboard with one category for each layer.

        Raises:
            SinkUnavailableError: TensorBoard is not installed.
            FieldUnknownError: a field does not exist.
            ConfigurationError: both a directory and a writer were given.
        """
        require_library("tensorboard", "TensorBoard", "tensorboard")
        super().__init__(fields, histograms)
        if log_dir is not None and writer is not None:
            raise ConfigurationError(
                "TensorBoardSink got a log_dir and a writer", remedy="give one of them; the writer has its directory"
            )
        self.log_dir = None if log_dir is None else Path(log_dir)
        self._theirs = writer
        self._ours: SummaryWriter | None = None
        self._layout = LayoutBook(self.fields) if layout else None
        self._relays: tuple[str, ...] = ()

    @property
    def capabilities(self) -> frozenset[str]:
        """No histograms where a relay would change them."""
        return self.carries - {"raw_histogram"} if self._relays or relays() else self.carries

    def admit(self, plan: RunPlan) -> None:
        """Name all sites, and look for relays.

        Raises:
            SinkUnavailableError: there is neither a directory nor a writer.
            SinkTagError: two sites would have one name.
        """
        if self.log_dir is None and self._theirs is None:
            raise SinkUnavailableError("TensorBoardSink has no target", remedy="give it a log_dir or a writer")
        super().admit(plan)
        self._relays = relays()

    @property
    def disclosures(self) -> tuple[str, ...]:
        """Relays, changed names, and what a writer of the caller's could not do."""
        told = list(super().disclosures)
        if self._relays:
            told.append(
                f"{', '.join(self._relays)} copies what TensorBoard's writers get; histograms were left out, because "
                "such a relay re-bins them and counts steps in its own way"
            )
        return tuple(told)

    def overtaken_note(self, step: int) -> str:
        """Say how the caller's writer hides what an earlier attempt wrote; the sink's own does it by itself."""
        return (
            f"the writer is the caller's: points from step {step} on that an earlier attempt wrote stay visible unless "
            f"it was made with purge_step={step}"
        )

    def open(self, run: RunInfo) -> None:
        """Open the event file; points from ``run.resume_step`` on that an earlier attempt wrote are purged."""
        if self._theirs is None:
            self._ours = self._open_file(run)
        if self._theirs is None:
            self.describe(run)
        else:
            # A writer forgets its purge_step once it is open, so nobody can tell what it hides.
            super().begin_segment(run)

    def begin_segment(self, run: RunInfo) -> None:
        """Hide what the sink's own file has from ``run.resume_step`` on; that of the caller is left alone."""
        if self._ours is None:
            super().begin_segment(run)
            return
        if run.resume_step is not None:
            _purge(self._ours, run.resume_step)
        self.describe(run)

    def describe(self, run: RunInfo) -> None:
        """Write the run record as text."""
        self._writer.add_text("rankfold/run", f"    {to_strict_json(run.to_record())}", run.resume_step or 0)

    def emit(self, step: MergedStep) -> None:
        """Write the numbers of the step as one event, and a text if there are findings."""
        writer, wall_time = self._writer, step.packet.facts.wall_time_s or None
        _require_open(writer)
        # One may come at any time: wandb.init(sync_tensorboard=True) after watch, for instance.
        self._relays = self._relays or relays()
        if self._layout is not None and self._layout.take_in(step.new_sites):
            writer.add_custom_scalars(self._layout.layout())
        _write_values(writer, step.step, [*_scalars(self.scalars(step)), *self._histograms(step)], wall_time)
        if text := findings_text(step):
            writer.add_text("rankfold/findings", text, step.step, wall_time)

    def flush(self) -> None:
        """Write out what TensorBoard's writer still holds."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file; a writer of the caller's stays open."""
        if self._theirs is not None:
            self._theirs.flush()
        if self._ours is not None:
            self._ours.close()
            self._ours = None

    def _histograms(self, step: MergedStep) -> Iterator[Summary.Value]:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in histogram_points(step) if self.shows_histograms else ():
            name, histogram = self.tags.name(point.site), _histogram(step, point)
            if name is not None and histogram is not None:
                yield Summary.Value(tag=f"{name}/histogram", histo=histogram)

    def _open_file(self, run: RunInfo) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(
            str(self.log_dir),
            purge_step=run.resume_step,
            # Two attempts of one second, on hosts of one name, still get files of their own.
            filename_suffix=f".{run.run_id[:8]}-{run.segment:05d}",
        )
        speed_up(writer)
        return writer

    @property
    def _writer(self) -> SummaryWriter:
        writer = self._ours or self._theirs
        assert writer is not None, "open comes first"
        return writer


def _require_open(writer: SummaryWriter) -> None:
    # A closed SummaryWriter would open a second file, which nobody closes.
    if getattr(writer, "file_writer", None) is None:
        raise SinkUnavailableError("the writer was closed by its owner", remedy="close it after the session")


def _purge(writer: SummaryWriter, step: int) -> None:
    """Mark a new start in an open file, as a writer does that is made with ``purge_step``."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    file_writer: Any = writer.file_writer
    file_writer.add_event(Event(step=step, file_version="brain.Event:2"))
    file_writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))


def _write_values(writer: SummaryWriter, step: int, values: list[Summary.Value], wall_time: float | None) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary

    # One event for all: an event each takes ten times as long, and TensorBoard opens its file anew for each.
    file_writer: Any = writer.file_writer
    file_writer.add_summary(Summary(value=values), step, wall_time)


def _scalars(scalars: dict[str, int | float]) -> Iterator[Summary.Value]:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return (Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items())


def _histogram(step: MergedStep, point: HistogramPoint) -> HistogramProto | None:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    bins = finite_bins(point.histogram)
    if bins is None:
        return None
    floats = dict(zip(FLOAT_FIELDS, step.packet.floats[point.row].tolist(), strict=True))
    return HistogramProto(
        min=floats["min"],
        max=floats["max"],
        num=int(step.packet.ints[point.row, FINITE]),
        sum=floats["sum"],
        sum_squares=floats["sum_sq"],
        # TensorBoard knows right edges only, so an empty bucket in front carries the left edge of the first one.
        bucket_limit=bins.edges.tolist(),
        bucket=[0, *bins.counts.tolist()],
    )
