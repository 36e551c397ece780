"""Rows that stand for several steps: the merge of ranks, over time, on encoded tables.

Only rows in memory do; they have the columns ``SPANS`` beside their own.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from aggregator.history.coarsen import as_merged
from aggregator.history.encode import statistic_columns
from aggregator.history.schema import OBSERVATIONS, REPLICA_LABELS, SPANS
from telemetry.presence import Presence
from telemetry.summary import FLOAT_FIELDS, merge_packed

__all__ = ["SPAN_SCHEMA", "as_span", "merge_observations"]

SPAN_SCHEMA: Final = pa.schema([*OBSERVATIONS, *SPANS])

_ABSMAX: Final = FLOAT_FIELDS.index("absmax")
_AGREE, _DISAGREE, _NOT_CHECKED = range(len(REPLICA_LABELS))
_RANK_COUNTS: Final = ("num_scheduled", "num_observed", "num_contributing", "num_nonfinite_ranks")


def as_span(rows: pa.Table) -> pa.Table:
    """Return observations as rows with schema ``SPAN_SCHEMA``, if they are those of one step and are none yet."""
    if rows.schema.names == SPAN_SCHEMA.names:
        return rows
    observed = pc.equal(rows["presence"], int(Presence.OBSERVED)).cast(pa.int64())
    ones = pa.array(np.ones(rows.num_rows, np.int64))
    columns = [*rows.columns, rows["step"], ones, observed]
    return pa.Table.from_arrays(columns, schema=SPAN_SCHEMA)


def merge_observations(earlier: pa.Table, later: pa.Table, step: int) -> pa.Table:
    """Return one row for each site of either, all of them at ``step``.

    Counts and histograms are exact; floats merge as ranks do, ``earlier`` first. The state of a row is the best of the
    two. Numbers of ranks are the larger of the two, the rank of the absolute maximum is that of the larger one, and the
    first non-finite rank that of the first step that had one; replicas agree if they never disagreed.

    Args:
        earlier, later: with schema ``SPAN_SCHEMA``, one row a site each; ``later`` has the later steps.
        step: the last step of both, whether or not a site was scheduled there.
    """
    sites = np.union1d(earlier["site"].to_numpy(), later["site"].to_numpy())
    a, b = _over(earlier, sites), _over(later, sites)
    presence_a, presence_b = (_filled(rows, "presence", Presence.NOT_SCHEDULED) for rows in (a, b))
    presence = np.minimum(presence_a, presence_b)
    ints_a, floats_a = as_merged(a, presence_a == Presence.OBSERVED)
    ints_b, floats_b = as_merged(b, presence_b == Presence.OBSERVED)
    ints, floats = merge_packed((ints_a, floats_a), (ints_b, floats_b))
    observed = presence == Presence.OBSERVED
    later_is_larger = floats_b[:, _ABSMAX] > floats_a[:, _ABSMAX]
    bins, counts = _merge_histograms(a, b)
    columns: dict[str, Any] = {
        "step": np.full(len(sites), step, np.int64),
        "site": sites,
        "presence": presence.astype(np.uint8),
        "reason": pc.if_else(pa.array(presence_a <= presence_b), _column(a, "reason"), _column(b, "reason")),
        **{name: pc.max_element_wise(_column(a, name), _column(b, name)) for name in _RANK_COUNTS},
        "absmax_rank": pc.if_else(pa.array(later_is_larger), _column(b, "absmax_rank"), _column(a, "absmax_rank")),
        "first_nonfinite_rank": pc.coalesce(_column(a, "first_nonfinite_rank"), _column(b, "first_nonfinite_rank")),
        "replicas": pa.array(_replicas(a, b), mask=~observed),
        "hist_bins": bins,
        "hist_counts": counts,
        **statistic_columns(ints, floats, observed),
        "step_lo": pc.coalesce(_column(a, "step_lo"), _column(b, "step_lo")),
        **{name: _filled(a, name, 0) + _filled(b, name, 0) for name in ("num_steps", "num_observed_steps")},
    }
    return pa.table(columns, schema=SPAN_SCHEMA)


def _over(rows: pa.Table, sites: NDArray[np.uint64]) -> pa.Table:
    """Return one row for each of ``sites``, of nulls where ``rows`` has none."""
    places = pc.index_in(pa.array(sites), value_set=_column(rows, "site"))
    return rows.take(places).combine_chunks()


def _column(rows: pa.Table, name: str) -> pa.Array:
    return rows[name].combine_chunks()


def _filled(rows: pa.Table, name: str, value: int) -> NDArray[Any]:
    filled: NDArray[Any] = rows[name].fill_null(value).to_numpy()
    return filled


def _replicas(a: pa.Table, b: pa.Table) -> NDArray[np.uint8]:
    first, second = (_filled(rows, "replicas", _NOT_CHECKED) for rows in (a, b))
    verdict = np.where((first == _AGREE) | (second == _AGREE), _AGREE, _NOT_CHECKED)
    return np.where((first == _DISAGREE) | (second == _DISAGREE), _DISAGREE, verdict).astype(np.uint8)


def _merge_histograms(a: pa.Table, b: pa.Table) -> tuple[pa.Array, pa.Array]:
    """Add sparse histograms bin by bin; null where neither has one."""
    num_rows = a.num_rows
    cells = [_cells(rows) for rows in (a, b)]
    keys, inverse = np.unique(np.concatenate([keys for keys, _ in cells]), return_inverse=True)
    counts = np.zeros(len(keys), np.int64)
    np.add.at(counts, inverse, np.concatenate([counts for _, counts in cells]))
    lengths = np.bincount((keys >> 16).astype(np.int64), minlength=num_rows)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    absent = pc.and_(_column(a, "hist_bins").is_null(), _column(b, "hist_bins").is_null())
    return (
        pa.ListArray.from_arrays(offsets, pa.array((keys & 0xFFFF).astype(np.uint16)), mask=absent),
        pa.ListArray.from_arrays(offsets, pa.array(counts), mask=absent),
    )


def _cells(rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return row · 2^16 + bin of every bin that is not empty, and its count."""
    bins = _column(rows, "hist_bins")
    owners = pc.list_parent_indices(bins).to_numpy().astype(np.int64)
    keys = (owners << 16) | bins.flatten().to_numpy().astype(np.int64)
    return keys, _column(rows, "hist_counts").flatten().to_numpy()
