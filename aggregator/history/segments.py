"""The attempts of a run as a table."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from aggregator.history.plan import Views
from aggregator.strict_json import to_strict_json

__all__ = ["SEGMENTS", "segments_table"]

SEGMENTS: Final = pa.schema(
    [
        ("segment", pa.int32()),
        ("parent", pa.int32()),
        ("resume_step", pa.int64()),
        ("uuid", pa.string()),
        ("started_unix_s", pa.float64()),
        ("host", pa.string()),
        ("pid", pa.int64()),
        ("num_commits", pa.int64()),
        ("last_step", pa.int64()),
        ("end_step", pa.int64()),
        ("sealed", pa.bool_()),
        ("run", pa.string()),
    ]
)


def segments_table(views: Views) -> pa.Table:
    """Return one row a segment, with schema ``SEGMENTS``."""
    rows = [
        {
            **{name: view.record[name] for name in SEGMENTS.names if name in view.record},
            "num_commits": view.index.num_commits if view.index else 0,
            "last_step": view.index.last_step if view.index else None,
            "end_step": view.end_step,
            "sealed": view.index.sealed if view.index else False,
            "run": to_strict_json(view.record["run"]),
        }
        for view in views
    ]
    return pa.Table.from_pylist(rows, schema=SEGMENTS)
