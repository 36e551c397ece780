"""A record against a reference, field by field: what the limits of the exactness gates are held against."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from aggregator import open_history
from launch.gates.gathered import Key
from launch.gates.spec import Limit
from telemetry.summary import FLOAT_FIELDS, INT_FIELDS, TensorSummary

__all__ = ["EXACTNESS", "Comparison", "compare_record"]

# "calls" counts the ranks that contributed, which one process cannot know.
_INTS: Final = tuple(name for name in INT_FIELDS if name != "calls")
_FLOOR: Final = 1e-6

EXACTNESS: Final = (
    Limit("observations compared", "at least", 100),
    Limit("observations missing or not in the reference", "equal to", 0),
    Limit("integer fields that differ", "equal to", 0),
    Limit("histogram bins that differ", "equal to", 0),
    Limit("largest relative difference of a float", "at most", 1e-6),
    Limit("findings", "equal to", 0),
)
"""Limits of every exactness gate."""


@dataclass
class Comparison:
    """What was compared so far, and the first difference of each sort in words."""

    num_compared: int = 0
    num_unmatched: int = 0
    num_ints: int = 0
    num_bins: int = 0
    largest: float = 0.0
    where_largest: str = ""
    first: dict[str, str] = field(default_factory=dict)

    def note(self, sort: str, text: str) -> None:
        """Keep the first difference of a sort."""
        self.first.setdefault(sort, text)


def compare_record(to: Path, reference: Mapping[Key, TensorSummary]) -> dict[str, object]:
    """Compare every observation of a run, and return the quantities of ``EXACTNESS`` with notes.

    Integers and bins have to be equal. The difference of a float is relative to the reference; where a sum cancels, to
    a millionth of the sum of its magnitudes, because that is what the last bits of its terms amount to.
    """
    history = open_history(to)
    rows = {(row["step"], row["kind"], row["site"]): row for row in history.observations().to_pylist()}
    found = Comparison()
    for key in sorted(rows.keys() | reference.keys()):
        row = rows.get(key)
        if row is None or key not in reference or row["presence"] != "observed":
            found.num_unmatched += 1
            state = "not recorded" if row is None else f"{row['presence']} {row['reason'] or ''}".rstrip()
            found.note("unmatched", f"{_named(key)}: {state}, {'' if key in reference else 'not '}in the reference")
            continue
        found.num_compared += 1
        _compare(key, row, reference[key], found)
    findings = history.findings().to_pylist()
    values = (found.num_compared, found.num_unmatched, found.num_ints, found.num_bins, found.largest, len(findings))
    measured: dict[str, object] = dict(zip((limit.name for limit in EXACTNESS), values, strict=True))
    return {
        **measured,
        "first differences": found.first,
        "where the largest relative difference is": found.where_largest,
        "first finding": findings[0]["message"] if findings else "",
    }


def _compare(key: Key, row: Mapping[str, Any], wanted: TensorSummary, found: Comparison) -> None:
    for name in _INTS:
        if row[name] != getattr(wanted, name):
            found.num_ints += 1
            found.note("integers", f"{_named(key)} {name}: {row[name]}, reference {getattr(wanted, name)}")
    assert wanted.histogram is not None, "the reference is summarised with histograms"
    counts = np.zeros_like(wanted.histogram.counts)
    counts[list(row["hist_bins"] or ())] = row["hist_counts"] or ()
    if differing := int(np.count_nonzero(counts != wanted.histogram.counts)):
        found.num_bins += differing
        found.note("bins", f"{_named(key)}: {differing} bins differ")
    for name in FLOAT_FIELDS:
        difference = _difference(name, row[name], wanted)
        if not difference <= found.largest:
            found.largest = difference
            found.where_largest = f"{_named(key)} {name}: {row[name]!r}, reference {getattr(wanted, name)!r}"


def _difference(name: str, value: float | None, wanted: TensorSummary) -> float:
    expected = getattr(wanted, name)
    if value is None or math.isnan(expected):
        return 0.0 if value is None and math.isnan(expected) else math.inf
    magnitudes = {
        "sum": wanted.sum_abs,
        "mean": wanted.sum_abs / max(1, wanted.finite),
        # Cauchy-Schwarz bounds the sum of the cubes' magnitudes.
        "m3": math.sqrt(wanted.m2 * wanted.m4),
    }
    scale = max(abs(expected), _FLOOR * magnitudes.get(name, 0.0))
    return abs(value - expected) / scale if scale > 0.0 else float(value != expected)


def _named(key: Key) -> str:
    step, kind, site = key
    return f"{kind} {site} at step {step}"
