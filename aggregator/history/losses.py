"""What a reader that salvages has had to leave out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final

import pyarrow as pa

__all__ = ["LOSSES", "Loss", "losses_table"]

LOSSES: Final = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("segment", pa.int32()),
        pa.field("table", pa.string()),
        pa.field("step_lo", pa.int64()),
        pa.field("step_hi", pa.int64()),
        pa.field("problem", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Loss:
    """One range of one file that is not what was written.

    Attributes:
        file: its path; segment, table: what it belongs to, None where it is more than one.
        step_lo, step_hi: the steps that were in it, None where that cannot be told.
        problem: what is wrong, in words.
    """

    file: str
    segment: int | None
    table: str | None
    step_lo: int | None
    step_hi: int | None
    problem: str


def losses_table(losses: Iterable[Loss]) -> pa.Table:
    """Return one row a loss, each once, with schema ``LOSSES``."""
    return pa.Table.from_pylist([asdict(loss) for loss in dict.fromkeys(losses)], schema=LOSSES)
