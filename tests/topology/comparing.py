"""Compare two records field by field: every integer and bin equal, floats to a relative tolerance."""

from __future__ import annotations

import math

from telemetry.summary import INT_FIELDS, TensorSummary
from telemetry.summary.fields import FLOAT_FIELDS

# "calls" counts the ranks that contributed, which a sharded and a whole record do not share.
COMPARED_INTS = tuple(name for name in INT_FIELDS if name != "calls")


def describe(summary: TensorSummary) -> dict[str, object]:
    """Return what is compared as plain values, so that it can leave a rank."""
    histogram = summary.histogram
    return {
        "ints": [getattr(summary, name) for name in COMPARED_INTS],
        "floats": [getattr(summary, name) for name in FLOAT_FIELDS],
        "bins": None if histogram is None else histogram.counts.tolist(),
    }


def assert_same_record(found: dict, expected: dict, rel: float, scale: float = 1e-12) -> None:
    """Check that two records, key → described summary, agree; ``scale`` bounds differences of values near zero."""
    assert found.keys() == expected.keys()
    for key in expected:
        assert found[key]["ints"] == expected[key]["ints"], (key, found[key]["floats"], expected[key]["floats"])
        assert found[key]["bins"] == expected[key]["bins"], key
        for name, a, b in zip(FLOAT_FIELDS, found[key]["floats"], expected[key]["floats"], strict=True):
            assert math.isclose(a, b, rel_tol=rel, abs_tol=scale) or (math.isnan(a) and math.isnan(b)), (
                key,
                name,
                a,
                b,
            )
