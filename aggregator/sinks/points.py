"""One merged step as the points of a tracker: scalars and histograms by tag, findings as text.

A value that does not exist makes no point: a chart has a gap where nothing was observed or nothing was finite, and the
count of non-finite elements says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aggregator.catalogue import MergedStep
from aggregator.sinks.bins import sparse_counts
from aggregator.sinks.tags import TagBook, step_tag
from aggregator.sinks.values import NONFINITE, step_values
from telemetry.errors import FieldUnknownError
from telemetry.presence import Presence
from telemetry.sites import SiteSpec
from telemetry.summary import SUMMARY_FIELDS
from telemetry.summary.histogram import Histogram

__all__ = [
    "DEFAULT_FIELDS",
    "HISTOGRAMS_FORMAT",
    "HistogramPoint",
    "checked_fields",
    "findings_text",
    "histogram_document",
    "histogram_points",
    "scalar_points",
]

DEFAULT_FIELDS: Final = (
    "mean",
    "std",
    "rms",
    "l2",
    "min",
    "max",
    "absmax",
    "zero_fraction",
    "total",
    NONFINITE,
)
"""What one alerts on or looks at first; every site that has a histogram has these as well."""

HISTOGRAMS_FORMAT: Final = "rankfold.histograms.v1"


def checked_fields(sink: str, fields: Sequence[str]) -> tuple[str, ...]:
    """Return the fields that a sink is to show.

    Raises:
        FieldUnknownError: one of them does not exist.
    """
    if unknown := [field for field in fields if field not in (*SUMMARY_FIELDS, NONFINITE)]:
        raise FieldUnknownError(f"{sink} got fields {unknown}", remedy=f"use {', '.join((*SUMMARY_FIELDS, NONFINITE))}")
    return tuple(fields)


def scalar_points(step: MergedStep, fields: Sequence[str], tags: TagBook) -> dict[str, int | float]:
    """Return tag → value: what belongs to the step, then every field of every site that has such a value.

    The norm of a site that is only sampled is an estimate and is left out; the history has it.
    """
    facts = step.packet.facts
    found: dict[str, int | float] = {
        step_tag("self_ms"): facts.self_s * 1e3,
        step_tag("step_ms"): facts.step_s * 1e3,
        step_tag("segment"): step.packet.segment,
        step_tag("ranks_merged"): step.num_ranks,
        step_tag("findings"): len(step.packet.findings),
    }
    names = [tags.name(site) for site in step.sites]
    for field in fields:
        for site, name, value in zip(step.sites, names, step_values(step, field), strict=True):
            if value is not None and name is not None and not (field == "l2" and site.estimated):
                found[f"{name}/{field}"] = value
    return found


@dataclass(frozen=True)
class HistogramPoint:
    """A histogram of a step.

    Attributes:
        site: what it is of.
        row: index of the site in the rows of the packet.
        histogram: all counts, non-finite ones included.
    """

    site: SiteSpec
    row: int
    histogram: Histogram


def histogram_points(step: MergedStep) -> Iterator[HistogramPoint]:
    """Yield the histograms of the sites that were observed."""
    packet = step.packet
    row_of = {site.site_id: row for row, site in enumerate(step.sites)}
    for site_id, counts in zip(packet.hist_sites.tolist(), packet.hist_counts, strict=True):
        row = row_of[site_id]
        if packet.presence[row] == Presence.OBSERVED:
            yield HistogramPoint(step.sites[row], row, Histogram(packet.descriptor, counts))


def histogram_document(step: MergedStep) -> Mapping[str, Any] | None:
    """Return all histograms of a step as one JSON object, for trackers that keep files; None if there are none."""
    histograms = [
        {"kind": point.site.kind, "site": point.site.name, **sparse_counts(point.histogram.counts)}
        for point in histogram_points(step)
    ]
    if not histograms:
        return None
    descriptor = step.packet.descriptor.to_wire()
    return {"format": HISTOGRAMS_FORMAT, "step": step.step, "descriptor": descriptor, "histograms": histograms}


def findings_text(step: MergedStep) -> str:
    """Return the findings of a step in Markdown, "" if there are none."""
    return "\n\n".join(f"**{finding['code']}** {finding['message']}" for finding in step.packet.findings)
