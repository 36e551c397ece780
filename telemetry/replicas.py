"""What ranks say of the parts that they hold in common: one fingerprint for each part, and who has it.

An entry stands for a set of ranks that hold the same bits of one part (slot) of one site. While all replicas agree
there is one entry a slot, however many ranks merge. Where they disagree there are several, each with its lowest ranks
and a digest by which the size of the disagreement can be told.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["DIGEST_FIELDS", "MAX_NAMED_RANKS", "REPLICA_COLUMNS", "ReplicaTable"]

MAX_NAMED_RANKS: Final = 8
DIGEST_FIELDS: Final = ("sum", "sum_abs", "sum_sq", "absmax")

REPLICA_COLUMNS: Final[dict[str, tuple[str, tuple[int, ...]]]] = {
    "sites": ("<u8", ()),
    "slots": ("<i8", ()),
    "fingerprints": ("<i8", ()),
    "num_ranks": ("<i4", ()),
    "ranks": ("<i4", (MAX_NAMED_RANKS,)),
    "digests": ("<f8", (len(DIGEST_FIELDS),)),
}


@dataclass(frozen=True, eq=False)
class ReplicaTable:
    """Fingerprints of replicated parts, ascending by (site, slot, fingerprint), each combination once.

    Attributes:
        sites: uint64 ``[m]``, site ids; slots: int64 ``[m]``, the part; fingerprints: int64 ``[m]``.
        num_ranks: int32 ``[m]``, ranks that hold exactly these bits.
        ranks: int32 ``[m, 8]``, the lowest of them, ascending, padded with -1.
        digests: float64 ``[m, 4]``, the fields of ``DIGEST_FIELDS``.
    """

    sites: NDArray[np.uint64]
    slots: NDArray[np.int64]
    fingerprints: NDArray[np.int64]
    num_ranks: NDArray[np.int32]
    ranks: NDArray[np.int32]
    digests: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.sites)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReplicaTable):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    @staticmethod
    def empty() -> ReplicaTable:
        """Return a table without entries."""
        return ReplicaTable(**{name: np.empty((0, *tail), dtype) for name, (dtype, tail) in REPLICA_COLUMNS.items()})

    @staticmethod
    def of_rank(
        rank: int,
        sites: NDArray[np.uint64],
        slots: NDArray[np.int64],
        fingerprints: NDArray[np.int64],
        digests: NDArray[np.float64],
    ) -> ReplicaTable:
        """Return the table of one rank; ``sites`` are ascending and each stands once."""
        ranks = np.full((len(sites), MAX_NAMED_RANKS), -1, dtype=np.int32)
        ranks[:, 0] = rank
        return ReplicaTable(sites, slots, fingerprints, np.ones(len(sites), dtype=np.int32), ranks, digests)

    def merge(self, other: ReplicaTable) -> ReplicaTable:
        """Return the entries of both; equal fingerprints of one part become one entry."""
        if self._has_parts_of(other):
            ranks = _lowest(self.ranks, other.ranks)
            return replace(self, num_ranks=self.num_ranks + other.num_ranks, ranks=ranks)
        both = {f.name: np.concatenate((getattr(self, f.name), getattr(other, f.name))) for f in fields(self)}
        order = np.lexsort((both["fingerprints"], both["slots"], both["sites"]))
        columns: dict[str, NDArray[Any]] = {name: column[order] for name, column in both.items()}
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = np.any(
            [columns[name][1:] != columns[name][:-1] for name in ("sites", "slots", "fingerprints")], axis=0
        )
        merged = {name: column[is_first] for name, column in columns.items()}
        # Each side holds a combination at most once, so what is not the first of its run is the second.
        pairs = np.flatnonzero(~is_first)
        into = np.cumsum(is_first)[pairs] - 1
        merged["num_ranks"][into] += columns["num_ranks"][pairs]
        merged["ranks"][into] = _lowest(columns["ranks"][pairs - 1], columns["ranks"][pairs])
        return ReplicaTable(**merged)

    def _has_parts_of(self, other: ReplicaTable) -> bool:
        """Tell whether both hold the same fingerprints of the same parts, as replicas that agree do."""
        return all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("sites", "slots", "fingerprints")
        )


def _lowest(a: NDArray[np.int32], b: NDArray[np.int32]) -> NDArray[np.int32]:
    nowhere = np.iinfo(np.int32).max
    both = np.concatenate((a, b), axis=1)
    both[both < 0] = nowhere
    both.sort(axis=1)
    lowest = both[:, :MAX_NAMED_RANKS]
    lowest[lowest == nowhere] = -1
    return lowest
