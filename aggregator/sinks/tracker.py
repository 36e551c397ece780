"""What the sinks of trackers have in common: which fields they show, under which names, and what they refuse."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import ClassVar

from aggregator.catalogue import MergedStep
from aggregator.sinks.points import DEFAULT_FIELDS, checked_fields, scalar_points
from aggregator.sinks.protocol import RunInfo, RunPlan
from aggregator.sinks.tags import Alphabet, TagBook
from telemetry.errors import SinkUnavailableError

__all__ = ["TrackerSink", "require_library"]

_HISTOGRAM = frozenset({"raw_histogram"})


class TrackerSink:
    """Base of the sinks of trackers; a subclass adds ``name``, ``alphabet``, ``carries`` and the four calls of a sink.

    Attributes:
        fields: which fields become scalars.
        histograms: True if the user asked for histograms, False for none, None for what the tracker can carry.
        tags: names of the sites in this tracker.
        overtaken_from: first step that is run again while the tracker keeps what an earlier attempt wrote of it.
    """

    alphabet: ClassVar[Alphabet]
    carries: ClassVar[frozenset[str]]
    name: ClassVar[str]

    def __init__(self, fields: Sequence[str] = DEFAULT_FIELDS, histograms: bool | None = None) -> None:
        """Take what all trackers are told.

        Args:
            fields: which of ``telemetry.summary.SUMMARY_FIELDS`` and ``nonfinite`` become scalars.
            histograms: see the attribute.

        Raises:
            FieldUnknownError: a field does not exist.
        """
        self.fields = checked_fields(type(self).__name__, fields)
        self.histograms = histograms
        self.tags = TagBook(self.alphabet)
        self.overtaken_from: int | None = None

    @property
    def capabilities(self) -> frozenset[str]:
        """What it carries in this process."""
        return self.carries

    @property
    def wanted(self) -> frozenset[str]:
        """What the user asked for by name."""
        return _HISTOGRAM if self.histograms else frozenset()

    @property
    def shows_histograms(self) -> bool:
        """Whether histograms are written."""
        return self.histograms is not False and self.capabilities >= _HISTOGRAM

    def admit(self, plan: RunPlan) -> None:
        """Name all sites.

        Raises:
            SinkTagError: two of them would have one name.
        """
        self.tags.admit(plan.sites, self.name)

    @property
    def disclosures(self) -> tuple[str, ...]:
        """Names that were changed, sites that were left out, and points that a replay could not take back."""
        if self.overtaken_from is None:
            return self.tags.disclosures
        return (*self.tags.disclosures, self.overtaken_note(self.overtaken_from))

    def overtaken_note(self, step: int) -> str:
        """Say what a reader sees of an earlier attempt whose steps from ``step`` on were run again."""
        return (
            f"points from step {step} on that an earlier attempt wrote cannot be taken back here and stay visible; "
            "rankfold/segment tells the attempts apart, and the history shows the newest"
        )

    def begin_segment(self, run: RunInfo) -> None:
        """Remember from which step on the run goes again; what the run says of itself is written anew."""
        first = run.resume_step
        if first is not None:
            self.overtaken_from = first if self.overtaken_from is None else min(first, self.overtaken_from)
        self.describe(run)

    def describe(self, run: RunInfo) -> None:
        """Write the run record of a segment, where the tracker has a place for it."""

    def scalars(self, step: MergedStep) -> dict[str, int | float]:
        """Return tag → value of a step."""
        return scalar_points(step, self.fields, self.tags)


def require_library(module: str, title: str, install: str) -> None:
    """Refuse a sink whose library is not there, without importing it.

    Raises:
        SinkUnavailableError: with the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise SinkUnavailableError(f"{title} is not installed", remedy=f"pip install '{install}'")
