"""What the numbers of a record must satisfy whatever was measured; bytes that are whole may still hold nonsense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from aggregator.history.reader import History

__all__ = ["broken_invariants"]

_COLUMNS: Final = (
    "step", "kind", "site", "presence", "estimated", "total", "finite", "zero", "negative", "nan", "pos_inf", "neg_inf",
    "calls", "min", "max", "absmax", "m2", "num_scheduled", "num_observed", "num_contributing", "num_nonfinite_ranks",
    "hist_counts",
)  # fmt: skip
_MAX_BROKEN: Final = 1000


def broken_invariants(history: History, advance: Callable[[int], None] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows that cannot be true, at most 1,000: ``step kind site problem``.

    Args:
        history: an undamaged run.
        advance: called with the number of steps that were looked at since the last call.
    """
    num_broken, newest = 0, None
    world = max(history.coverage()["world_size"].to_pylist(), default=0)
    for batch in history.observation_batches(columns=list(_COLUMNS)):
        rows = pa.Table.from_batches([batch])
        for problem, broken in _checks(rows, world).items():
            for i in np.flatnonzero(broken).tolist():
                num_broken += 1
                if num_broken > _MAX_BROKEN:
                    return
                row = rows.slice(i, 1).select(["step", "kind", "site"]).to_pylist()[0]
                yield {**row, "problem": problem}
        steps = np.unique(rows["step"].to_numpy())
        if advance is not None:
            advance(int(np.sum(steps != newest)))
        newest = steps[-1] if len(steps) else newest


def _checks(rows: pa.Table, world: int) -> dict[str, NDArray[np.bool_]]:
    def count(name: str) -> NDArray[np.int64]:
        # Null, of a row without numbers, becomes 0; counts stay integers, or two large ones would pass for equal.
        counts: NDArray[np.int64] = rows[name].fill_null(0).to_numpy().astype(np.int64)
        return counts

    def column(name: str) -> NDArray[Any]:
        return np.asarray(rows[name].to_numpy(), dtype=np.float64)

    observed = pc.equal(rows["presence"], "observed").to_numpy()
    has_numbers = rows["total"].is_valid().to_numpy()
    total, finite = count("total"), count("finite")
    lists = rows["hist_counts"].combine_chunks()
    counted = ~lists.is_null().to_numpy(zero_copy_only=False)
    histogram = np.zeros(len(total), dtype=np.int64)
    np.add.at(histogram, pc.list_parent_indices(lists).to_numpy(), lists.flatten().to_numpy(zero_copy_only=False))
    with np.errstate(invalid="ignore"):
        return {
            "total is not finite + nan + pos_inf + neg_inf": observed
            & (total != finite + count("nan") + count("pos_inf") + count("neg_inf")),
            "zero + negative is more than finite": observed & (count("zero") + count("negative") > finite),
            "a count is negative": observed & ((total < 0) | (finite < 0) | (count("calls") < 0)),
            "min is larger than max": column("min") > column("max"),
            "absmax is not the larger of |min| and |max|": np.isfinite(column("min"))
            & (column("absmax") != np.maximum(np.abs(column("min")), np.abs(column("max")))),
            "m2 is negative": column("m2") < 0,
            "the histogram's counts do not add up to total": observed & counted & (histogram != total),
            "more ranks contributed, observed or were scheduled than there are": (
                (count("num_contributing") > count("num_observed"))
                | (count("num_observed") > count("num_scheduled"))
                | (count("num_scheduled") > world)
            ),
            "a row without an observation has numbers": ~observed & has_numbers,
        }
