"""The columns of a summary: their names, their order in a packed row, and how each one merges.

A packed row is 8 int64 counts followed by 10 float64 values: 144 bytes. Every backend writes rows of this shape and
every merge reads them, so the order below is part of the packet format.

Counts, over all elements unless said otherwise:

- ``total`` elements seen; ``finite`` of them; ``zero`` are ±0, decided on the bits (a subnormal is not zero);
  ``negative`` are finite and below zero; ``nan``, ``pos_inf``, ``neg_inf`` the rest. ``calls`` counts observations.
- always ``total = finite + nan + pos_inf + neg_inf``.

Floats, over the finite elements only: ``min max absmax sum sum_sq sum_abs``, ``mean`` = sum / finite, and the central
sums ``m2 m3 m4``, where mk = Σ (x - mean)^k. Of no finite elements they are the identity of merge: +inf for ``min``,
-inf for ``max``, 0 for the others. Readers show the identity as "no value", never as a number.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FLOAT_FIELDS", "INT_FIELDS", "NUM_FLOATS", "NUM_INTS", "ROW_WORDS"]

INT_FIELDS: Final = ("total", "finite", "zero", "negative", "nan", "pos_inf", "neg_inf", "calls")
FLOAT_FIELDS: Final = ("min", "max", "absmax", "sum", "sum_sq", "sum_abs", "mean", "m2", "m3", "m4")

NUM_INTS: Final = len(INT_FIELDS)
NUM_FLOATS: Final = len(FLOAT_FIELDS)
ROW_WORDS: Final = NUM_INTS + NUM_FLOATS

TOTAL, FINITE, ZERO, NEGATIVE, NAN, POS_INF, NEG_INF, CALLS = range(NUM_INTS)
MIN, MAX, ABSMAX, SUM, SUM_SQ, SUM_ABS, MEAN, M2, M3, M4 = range(NUM_FLOATS)
