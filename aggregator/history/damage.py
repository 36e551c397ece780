"""How damage is said: one refusal for one range of one file, with the steps that were in it."""

from __future__ import annotations

from pathlib import Path

from aggregator.history.index import ChunkEntry
from telemetry.errors import HistoryDamagedError

__all__ = ["MISSING", "WRONG_HASH", "damaged"]

WRONG_HASH = "its content does not have the hash it was written with"
MISSING = "the file is missing"


def damaged(segment: Path, entry: ChunkEntry, why: str) -> HistoryDamagedError:
    """Return the refusal of a chunk, with its file and the steps that it held."""
    return HistoryDamagedError(
        f"{segment / entry.file} is damaged in table {entry.table}, steps {entry.step_lo} to {entry.step_hi}: {why}",
        step=entry.step_lo,
        remedy="restore the file from a copy; the steps outside of this range can be read by naming them, or all that "
        "is left with open_history(..., salvage=True)",
    )
