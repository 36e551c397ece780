"""The numbers of one step as sinks show them: by row, estimates scaled, None where there is no value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.catalogue import MergedStep
from aggregator.estimates import represented_numel, scale_estimates
from telemetry.presence import Presence
from telemetry.summary import derive
from telemetry.summary.fields import FINITE, INT_FIELDS, TOTAL

__all__ = ["NONFINITE", "step_values"]

NONFINITE = "nonfinite"


def step_values(step: MergedStep, field: str) -> list[int | float | None]:
    """Return one field of every row of a step.

    Args:
        step: the merged step.
        field: any of ``telemetry.summary.SUMMARY_FIELDS``, or ``nonfinite``: elements that are NaN or infinite.

    Returns:
        Values aligned with ``step.sites``: int for a count, float otherwise, None for a row that was not observed or
        has no such value.
    """
    observed = (step.packet.presence == Presence.OBSERVED).tolist()
    return [
        value if seen and not math.isnan(value) else None
        for value, seen in zip(_column(step, field).tolist(), observed, strict=True)
    ]


def _column(step: MergedStep, field: str) -> NDArray[Any]:
    ints, floats = step.packet.ints, step.packet.floats
    if field == NONFINITE:
        return np.asarray(ints[:, TOTAL] - ints[:, FINITE])
    if field in INT_FIELDS:
        return derive(field, ints, floats)
    numel = np.array([represented_numel(site) for site in step.sites], dtype=np.float64)
    return scale_estimates(field, np.asarray(derive(field, ints, floats), dtype=np.float64), ints, numel)
