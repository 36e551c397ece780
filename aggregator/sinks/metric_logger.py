"""The scalars of the record for anything that has ``log_metrics(metrics, step)``, as loggers of Lightning do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from aggregator.catalogue import MergedStep
from aggregator.sinks.points import DEFAULT_FIELDS
from aggregator.sinks.protocol import RunInfo
from aggregator.sinks.tags import ANY_PRINTABLE
from aggregator.sinks.tracker import TrackerSink
from telemetry.errors import ConfigurationError

__all__ = ["MetricLogger", "MetricLoggerSink"]


@runtime_checkable
class MetricLogger(Protocol):
    """What the sink asks of a logger."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> object:
        """Take the numbers of a step."""
        ...


class MetricLoggerSink(TrackerSink):
    """Hands every step to a logger of the caller's, on the rank that writes the record, from a thread of its own.

    The logger is never closed. It gets scalars alone; asked for histograms, the sink refuses.

    Example:
        >>> class Printer:
        ...     def log_metrics(self, metrics, step):
        ...         print(step, metrics["activation/fc/rms"])
        >>> sink = MetricLoggerSink(Printer(), fields=["rms"])
    """

    name = "metric_logger"
    alphabet = ANY_PRINTABLE
    carries = frozenset({"scalar"})

    def __init__(
        self, logger: MetricLogger, fields: Sequence[str] = DEFAULT_FIELDS, *, histograms: bool | None = None
    ) -> None:
        """Keep the logger.

        Args:
            logger: anything that has ``log_metrics(metrics, step)``; the sink pickles if it does.
            fields: which of ``telemetry.summary.SUMMARY_FIELDS`` and ``nonfinite`` are logged.
            histograms: True refuses, as a logger has no histograms.

        Raises:
            ConfigurationError: the logger has no such method.
            FieldUnknownError: a field does not exist.
        """
        if isinstance(logger, type) or not isinstance(logger, MetricLogger):
            raise ConfigurationError(f"{logger!r} has no log_metrics", remedy="give an object with that method")
        super().__init__(fields, histograms)
        self.logger = logger

    def open(self, run: RunInfo) -> None:
        """Nothing has to be acquired."""
        self.begin_segment(run)

    def emit(self, step: MergedStep) -> None:
        """Hand over the numbers of a step."""
        self.logger.log_metrics(self.scalars(step), step.step)

    def flush(self) -> None:
        """Let the logger write out what it holds, if it can."""
        if callable(save := getattr(self.logger, "save", None)):
            save()

    def close(self) -> None:
        """The logger stays the caller's."""
