"""Merge packed summaries: the one function behind micro-batches, ranks, tree levels, actors and coarser time spans.

Counts add as int64. Extremes take the extreme. The central sums follow the pairwise update of Chan, Golub & LeVeque
(1979), to fourth order as in Pébay, "Formulas for Robust, One-Pass Parallel Computation of Covariances and
Arbitrary-Order Statistical Moments" (SAND2008-6212), eqs. 1.3 to 1.6, written with fractions na/n and nb/n so that
nothing is multiplied that could overflow before it is divided. The mean is the merged sum divided once by the merged
count. Counts come out the same in any order; floats in the last bits depend on the order, so callers fix it.

The same expressions run on numpy arrays (packets) and on torch tensors (the staging buffer of a device): the caller
hands in the namespace.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.summary import fields as f

__all__ = ["identity", "merge_floats", "merge_packed"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def identity(num_rows: int) -> tuple[Ints, Floats]:
    """Return ``num_rows`` empty summaries: ints ``[num_rows, 8]`` int64 and floats ``[num_rows, 10]`` float64."""
    ints = np.zeros((num_rows, f.NUM_INTS), dtype=np.int64)
    floats = np.zeros((num_rows, f.NUM_FLOATS), dtype=np.float64)
    floats[:, f.MIN] = np.inf
    floats[:, f.MAX] = -np.inf
    return ints, floats


def merge_packed(a: tuple[Ints, Floats], b: tuple[Ints, Floats]) -> tuple[Ints, Floats]:
    """Merge row i of ``a`` with row i of ``b``; ``a`` counts as the earlier one in the order of floats.

    Args:
        a, b: ints ``[rows, 8]`` int64 and floats ``[rows, 10]`` float64, laid out as in ``telemetry.summary.fields``.

    Returns:
        New arrays of the same shapes; the inputs are left alone.
    """
    (ints_a, floats_a), (ints_b, floats_b) = a, b
    # Infinite sums are legal values (float64 tensors near the top of their range), not a reason to warn.
    with np.errstate(over="ignore", invalid="ignore"):
        floats = merge_floats(np, ints_a[..., f.FINITE], floats_a, ints_b[..., f.FINITE], floats_b)
    return ints_a + ints_b, floats


def merge_floats(xp: Any, finite_a: Any, a: Any, finite_b: Any, b: Any) -> Any:
    """Merge the float columns; ``xp`` is ``numpy`` or ``torch``, and all arrays belong to it.

    Args:
        finite_a, finite_b: int64 ``[...]``, finite elements behind each row.
        a, b: float64 ``[..., 10]``.

    Returns:
        float64 ``[..., 10]``. No host synchronisation: every branch is a ``where``.
    """
    one, zero = xp.ones_like(a[..., f.SUM]), xp.zeros_like(a[..., f.SUM])
    na, nb = finite_a * one, finite_b * one
    n = na + nb
    divisor = xp.maximum(n, one)
    fa, fb = na / divisor, nb / divisor
    delta = xp.where((na > 0) & (nb > 0), b[..., f.MEAN] - a[..., f.MEAN], zero)

    sums = a[..., f.SUM] + b[..., f.SUM]
    m2a, m3a, m4a = a[..., f.M2], a[..., f.M3], a[..., f.M4]
    m2b, m3b, m4b = b[..., f.M2], b[..., f.M3], b[..., f.M4]
    spread = delta * delta * na * fb
    m2 = m2a + m2b + spread
    m3 = m3a + m3b + spread * delta * (fa - fb) + 3 * delta * (fa * m2b - fb * m2a)
    m4 = (
        m4a
        + m4b
        + spread * delta * delta * (fa * fa - fa * fb + fb * fb)
        + 6 * delta * delta * (fa * fa * m2b + fb * fb * m2a)
        + 4 * delta * (fa * m3b - fb * m3a)
    )
    columns = (
        xp.minimum(a[..., f.MIN], b[..., f.MIN]),
        xp.maximum(a[..., f.MAX], b[..., f.MAX]),
        xp.maximum(a[..., f.ABSMAX], b[..., f.ABSMAX]),
        sums,
        a[..., f.SUM_SQ] + b[..., f.SUM_SQ],
        a[..., f.SUM_ABS] + b[..., f.SUM_ABS],
        sums / divisor,
        *(
            # The identity stays one where a sum has overflowed: zero times infinity is not a number.
            xp.where(nb > 0, xp.where(na > 0, merged, theirs), ours)
            for ours, theirs, merged in ((m2a, m2b, m2), (m3a, m3b, m3), (m4a, m4b, m4))
        ),
    )
    return xp.stack(columns, -1)
