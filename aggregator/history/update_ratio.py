"""Update-to-weight ratios over the steps: two series of the record, divided where both have a number."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from aggregator.health.update_ratio import UPDATE_TO_WEIGHT, ratio_of
from telemetry.errors import FieldUnknownError

__all__ = ["ratio_series", "require_update"]


def require_update(kind: str) -> None:
    """Raise :class:`FieldUnknownError` unless ``kind`` is that of updates, which alone have the ratio."""
    if kind != "update":
        raise FieldUnknownError(
            f"{UPDATE_TO_WEIGHT!r} is a field of the kind 'update', not of {kind!r}", remedy="ask for kind='update'"
        )


def ratio_series(updates: pa.Table, weights: pa.Table) -> pa.Table:
    """Return the ratio at the steps of ``updates``.

    Args:
        updates, weights: ``rms`` of the update and of the parameter, columns ``step`` (ascending) and ``value``.

    Returns:
        Columns ``step`` and ``value``; null where one of the two has no number at the step, or the weight is all zero.
    """
    steps = updates["step"].to_numpy()
    known_steps, known = weights["step"].to_numpy(), weights["value"].to_numpy(zero_copy_only=False)
    weight = np.full(len(steps), np.nan)
    if len(known_steps):
        places = np.minimum(np.searchsorted(known_steps, steps), len(known_steps) - 1)
        met = known_steps[places] == steps
        weight[met] = known[places[met]]
    ratios = ratio_of(updates["value"].to_numpy(zero_copy_only=False).astype(np.float64), weight)
    return pa.table({"step": updates["step"], "value": pa.array(ratios, mask=np.isnan(ratios))})
