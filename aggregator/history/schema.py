"""The columns of the four stored tables, with their Arrow types.

Statistics that follow from the columns are not stored; readers derive them. ``site`` is the 64-bit id of (kind, name);
the ``sites`` table has its definition. A schema only ever grows: a reader gives null for a column that older rows lack.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from telemetry.presence import Presence
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS

__all__ = [
    "CHECKSUMS",
    "FINDINGS",
    "MERGE_RULES",
    "OBSERVATIONS",
    "PRESENCE_LABELS",
    "REPLICA_LABELS",
    "SCHEMAS",
    "SITES",
    "SPANS",
    "STEPS",
]

PRESENCE_LABELS: Final = tuple(presence.label for presence in Presence)
# Verdict on the copies that several ranks hold of one site.
REPLICA_LABELS: Final = ("agree", "disagree", "not_checked")

OBSERVATIONS: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("site", pa.uint64(), nullable=False),
        pa.field("presence", pa.uint8(), nullable=False),
        pa.field("reason", pa.string()),
        *(pa.field(name, pa.int64()) for name in INT_FIELDS),
        *(pa.field(name, pa.float64()) for name in FLOAT_FIELDS),
        pa.field("num_scheduled", pa.int32(), nullable=False),
        pa.field("num_observed", pa.int32(), nullable=False),
        pa.field("num_contributing", pa.int32(), nullable=False),
        pa.field("absmax_rank", pa.int32()),
        pa.field("num_nonfinite_ranks", pa.int32()),
        pa.field("first_nonfinite_rank", pa.int32()),
        pa.field("replicas", pa.uint8()),
        pa.field("hist_bins", pa.list_(pa.uint16())),
        pa.field("hist_counts", pa.list_(pa.int64())),
    ]
)

STEPS: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("wall_time_s", pa.float64(), nullable=False),
        pa.field("num_applied", pa.int32(), nullable=False),
        pa.field("num_skipped", pa.int32(), nullable=False),
        pa.field("num_unknown", pa.int32(), nullable=False),
        pa.field("num_micro_batches", pa.int32(), nullable=False),
        pa.field("num_optimizer_steps", pa.int32(), nullable=False),
        pa.field("skipped_ranks", pa.list_(pa.int32()), nullable=False),
        pa.field("grad_scale", pa.float64()),
        pa.field("grad_scale_state", pa.string(), nullable=False),
        pa.field("provenance", pa.string(), nullable=False),
        pa.field("mode", pa.string(), nullable=False),
        pa.field("step_s", pa.float64(), nullable=False),
        pa.field("self_s", pa.float64(), nullable=False),
        pa.field("world_size", pa.int32(), nullable=False),
        pa.field("num_ranks", pa.int32(), nullable=False),
        pa.field("missing_ranks", pa.list_(pa.int32()), nullable=False),
        pa.field("missing_reasons", pa.list_(pa.string()), nullable=False),
        pa.field("abstained_ranks", pa.list_(pa.int32()), nullable=False),
        pa.field("read_bytes", pa.int64()),
        pa.field("transfer_s", pa.float64()),
        pa.field("transfer_bytes", pa.int64()),
        pa.field("merge_s", pa.float64()),
        pa.field("num_budget_dropped", pa.int64()),
    ]
)

SITES: Final = pa.schema(
    [
        pa.field("site", pa.uint64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("numel", pa.int64()),
        pa.field("placements", pa.list_(pa.struct([("axis", pa.string()), ("placement", pa.string())]))),
        pa.field("aliases", pa.list_(pa.string()), nullable=False),
        pa.field("estimated", pa.bool_(), nullable=False),
        pa.field("first_step", pa.int64(), nullable=False),
    ]
)

FINDINGS: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
        pa.field("rank", pa.int64()),
        pa.field("site", pa.string()),
        pa.field("details", pa.string(), nullable=False),
    ]
)

# Beside ``OBSERVATIONS``, of rows in memory that stand for several steps; ``step`` is the last of them.
SPANS: Final = pa.schema(
    [
        pa.field("step_lo", pa.int64(), nullable=False),
        pa.field("num_steps", pa.int64(), nullable=False),
        pa.field("num_observed_steps", pa.int64(), nullable=False),
    ]
)

# Of a Parquet file: where each column chunk is and the CRC-32 of its bytes, page headers included. ``column`` counts
# the leaves of the Parquet schema.
CHECKSUMS: Final = pa.schema(
    [
        pa.field("row_group", pa.int32(), nullable=False),
        pa.field("column", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("crc32", pa.uint32(), nullable=False),
    ]
)

SCHEMAS: Final = {"observations": OBSERVATIONS, "steps": STEPS, "sites": SITES, "findings": FINDINGS}

# For the manifest: what a program that merges rows itself has to do with each statistic.
MERGE_RULES: Final = {
    **dict.fromkeys(INT_FIELDS, "sum"),
    **dict.fromkeys(("sum", "sum_sq", "sum_abs"), "sum"),
    "min": "min",
    "max": "max",
    "absmax": "max",
    "mean": "sum/finite",
    **dict.fromkeys(("m2", "m3", "m4"), "pairwise central sum"),
    "hist_counts": "sum by bin",
}
