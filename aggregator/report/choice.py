"""What of a run is drawn, where not all of it fits on a chart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aggregator.health.update_ratio import UPDATE_TO_WEIGHT
from aggregator.history import History
from aggregator.report.grid import Grid

__all__ = ["MAX_COLUMNS", "chosen_columns", "profile_kinds", "ratio_quantiles", "tick_rows"]

MAX_COLUMNS = 400
"""Columns of a heat map: more would be narrower than two pixels."""

_PROFILE = (("activation",), ("activation_grad", "gradient"))


def chosen_columns(num_columns: int, num_chosen: int = 5) -> list[int]:
    """Return evenly spaced columns, the first and the last included."""
    return np.unique(np.linspace(0, num_columns - 1, num_chosen).round().astype(int)).tolist() if num_columns else []


def tick_rows(num_rows: int, max_ticks: int) -> list[int]:
    """Return which rows are named on an axis."""
    return list(range(0, num_rows, max(1, -(-num_rows // max_ticks))))


def profile_kinds(history: History) -> list[str]:
    """Return the kinds whose size over depth is drawn: activations, and gradients of them or else of parameters."""
    there = set(history.sites()["kind"].to_pylist())
    return [next(kind for kind in kinds if kind in there) for kinds in _PROFILE if there.intersection(kinds)]


def ratio_quantiles(updates: Grid) -> list[tuple[str, NDArray[np.float64], bool]]:
    """Return quantiles of the update-to-weight ratio over all matrices in each column.

    Vectors are left out: a bias begins at zero, so that at first each step changes it by its own size.

    Returns:
        Name, float64 ``[columns]`` (NaN where no matrix has a ratio), and whether the area below is that of the band.
    """
    ratios = updates.fields[UPDATE_TO_WEIGHT][updates.is_matrix]
    named = (
        ("lowest", 0.0, False),
        ("10 %", 0.1, False),
        ("median", 0.5, True),
        ("90 %", 0.9, True),
        ("highest", 1.0, False),
    )
    has_any = np.isfinite(ratios).any(0)

    def quantile(q: float) -> NDArray[np.float64]:
        out = np.full(ratios.shape[1], np.nan)
        if has_any.any():
            out[has_any] = np.nanquantile(ratios[:, has_any], q, axis=0)
        return out

    return [(name, quantile(q), fill) for name, q, fill in named]
