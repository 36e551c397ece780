"""Numbers of a sample scaled to the whole: one rule for the history and for every sink.

Law: what is stored is what was counted. A site that is marked ``estimated`` was sampled, so its sums and its norm,
which grow with the number of elements, are scaled where they are shown: ``sum sum_sq sum_abs`` by numel / total,
``l2`` by sqrt(numel / finite). Counts, extremes and central sums stay those of the sample; means, standard deviations
and fractions estimate the whole as they are.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from telemetry.sites import SiteSpec
from telemetry.summary.fields import FINITE, TOTAL

__all__ = ["NOT_ESTIMATED", "represented_numel", "scale_estimates"]

NOT_ESTIMATED: Final = -1.0

_SUMS: Final = frozenset({"sum", "sum_sq", "sum_abs"})


def represented_numel(site: SiteSpec) -> float:
    """Return the elements that a sampled site stands for, NaN if unknown, ``NOT_ESTIMATED`` for any other site."""
    if not site.estimated:
        return NOT_ESTIMATED
    return float("nan") if site.numel is None else float(site.numel)


def scale_estimates(
    field: str, values: NDArray[np.float64], ints: NDArray[np.int64], numel: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Scale one field of sampled rows to the whole.

    Args:
        field: any summary field; those that need no scaling come back as they are.
        values: float64 ``[rows]``, the field as derived from the rows.
        ints: int64 ``[rows, 8]``, the counts of the rows.
        numel: float64 ``[rows]``, see :func:`represented_numel`.

    Returns:
        float64 ``[rows]``, NaN where the scale is not known.
    """
    if field not in _SUMS and field != "l2":
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        factor: NDArray[Any] = np.sqrt(numel / ints[:, FINITE]) if field == "l2" else numel / ints[:, TOTAL]
        return np.where(numel == NOT_ESTIMATED, values, values * factor)
