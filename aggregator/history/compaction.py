"""When small chunk files become one larger one, so that the index stays short however long the run is.

Each commit publishes the whole index of its segment. If every commit stayed an entry, that would be quadratic in the
length of the run. So the newest files are merged whenever ``FAN_IN`` of one tier stand at the end, or fewer that
together reach ``TARGET_BYTES``; the result is one tier higher. A run of n small commits keeps at most ``FAN_IN - 1``
files a tier, in log(n) tiers; of large data it keeps one file for each ``TARGET_BYTES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aggregator.history.index import ChunkEntry

__all__ = ["FAN_IN", "TARGET_BYTES", "ChunkFile", "files_to_merge"]

FAN_IN: Final = 32
TARGET_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class ChunkFile:
    """One file of a segment, with an entry for each table in it."""

    entries: tuple[ChunkEntry, ...]

    @property
    def tier(self) -> int:
        """How often its rows have been merged."""
        return self.entries[0].tier

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def seq(self) -> tuple[int, int]:
        """First and last commit in the file."""
        return self.entries[0].seq_lo, self.entries[0].seq_hi


def files_to_merge(files: Sequence[ChunkFile]) -> int:
    """Return how many of the newest files are due to become one; 0 if none are."""
    count = size = 0
    for file in reversed(files):
        if file.tier != files[-1].tier or file.size_bytes >= TARGET_BYTES:
            break
        count, size = count + 1, size + file.size_bytes
        if count == FAN_IN or (count > 1 and size >= TARGET_BYTES):
            return count
    return 0
