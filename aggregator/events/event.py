"""All events that exist. They are facts about committed steps and never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from telemetry.presence import Presence
from telemetry.summary import Histogram

__all__ = ["Event", "FindingEvent", "HistogramEvent", "ScalarEvent", "UnavailableEvent"]


@dataclass(frozen=True)
class ScalarEvent:
    """One number of one site at one step.

    Attributes:
        step: the caller's optimizer-step number.
        kind, site: source kind and name. Of kind ``step``, without a site, are ``step_ms``, ``self_ms`` (duration of
            the step, and our part of it, milliseconds) and ``ranks_merged``.
        field: else a summary field, ``nonfinite``, or ``update_to_weight`` (of kind ``update``).
        value: finite; None if the site was observed and has no such number.
        reason: why there is no number, "" where there is one.
    """

    type: ClassVar[str] = "scalar"
    step: int
    kind: str
    site: str
    field: str
    value: int | float | None
    reason: str = ""


@dataclass(frozen=True)
class HistogramEvent:
    """Histogram of one site at one step; its counts are read-only."""

    type: ClassVar[str] = "histogram"
    step: int
    kind: str
    site: str
    histogram: Histogram


@dataclass(frozen=True)
class FindingEvent:
    """A finding, ours or of the ranks; ``kind`` and ``site`` are "" where it is about no single site.

    Attributes:
        code, message: see ``docs/reference/findings.md``.
        details: the whole finding, JSON values.
    """

    type: ClassVar[str] = "finding"
    step: int
    kind: str
    site: str
    code: str
    message: str
    details: Mapping[str, Any]


@dataclass(frozen=True)
class UnavailableEvent:
    """A scheduled observation that has no numbers at this step, and why."""

    type: ClassVar[str] = "unavailable"
    step: int
    kind: str
    site: str
    presence: Presence
    reason: str


Event = ScalarEvent | HistogramEvent | FindingEvent | UnavailableEvent
