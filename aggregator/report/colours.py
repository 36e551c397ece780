"""Colours and words that all charts share, chosen so that they differ in lightness too, for whoever sees no hues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.report.grid import CellState, Grid

__all__ = ["COVERAGE", "DIVERGING", "MARKS", "SEQUENTIAL", "SERIES", "ZERO", "Mark", "cell_codes"]

ZERO: Final = 6
"""Code of a cell that was observed and is exactly zero, beside those of ``CellState``."""


@dataclass(frozen=True)
class Mark:
    """How one state that is no number looks.

    Attributes:
        code: of the cell.
        word: what it is called.
        colour: of the cell, or of its symbol in a line chart.
        symbol: plotly's name; matplotlib: matplotlib's.
    """

    code: int
    word: str
    colour: str
    symbol: str
    matplotlib: str


MARKS: Final = (
    Mark(CellState.MISSING, "missing: scheduled, not observed", "#8b929c", "line-ew-open", "_"),
    Mark(CellState.SOME_NONFINITE, "some elements NaN or ±inf", "#f0489b", "x", "x"),
    Mark(CellState.ALL_NONFINITE, "no element finite", "#a1004f", "x", "X"),
    Mark(CellState.EMPTY, "no elements", "#c9b3e6", "square-open", "s"),
    Mark(ZERO, "exactly zero", "#9fe0f5", "circle-open", "o"),
)

# Cividis, and a brown to teal scale with a light middle: both are ordered by lightness.
SEQUENTIAL: Final = ("#00224e", "#2a3f6d", "#575d6d", "#7d7c78", "#a59c74", "#d2c060", "#fee838")
DIVERGING: Final = ("#543005", "#a6611a", "#dfc27d", "#f5f5f5", "#80cdc1", "#018571", "#003c30")
SERIES: Final = ("#3b7dd8", "#d97a1a", "#2f9e7a", "#8a63d2", "#b8882a")
COVERAGE: Final = (
    (0, "no such rank", "#e5e7eb"),
    (1, "in the step", "#3b7dd8"),
    (2, "abstained: too many steps in flight", "#e8a33d"),
    (3, "missing", "#f0489b"),
)


def cell_codes(grid: Grid, field: str) -> NDArray[np.uint8]:
    """Return the state of each cell, ``[rows, columns]``, with :data:`ZERO` where the field is exactly zero."""
    is_zero = (grid.state == CellState.OBSERVED) & (grid.fields[field] == 0)
    return np.where(is_zero, np.uint8(ZERO), grid.state)
