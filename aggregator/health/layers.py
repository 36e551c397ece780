"""Which sites are neighbours: the same part of the model in two layers that follow each other.

``layers.3.mlp.weight`` and ``layers.4.mlp.weight`` are neighbours; so are ``0.weight`` and ``2.weight`` of a sequence
whose part 1 has no such site. The layer is the first segment of a name that is a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from telemetry.sites import SiteSpec

__all__ = ["chains"]


def chains(rows: Iterable[int], sites: Sequence[SiteSpec]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put those of ``rows`` that lie in a layer one after the other, part by part and by layer from the input on.

    Returns:
        Two int64 arrays of one length: the rows, and the number of the chain that each belongs to.
    """
    placed = [(sites[row].kind, *place, row) for row in rows if (place := _place(sites[row].name)) is not None]
    placed.sort()
    numbers: dict[tuple[str, str], int] = {}
    ids = [numbers.setdefault((kind, part), len(numbers)) for kind, part, _, _ in placed]
    return np.array([row for *_, row in placed], dtype=np.int64), np.array(ids, dtype=np.int64)


def _place(name: str) -> tuple[str, int] | None:
    """Return (name without the number of the layer, number), None where there is no number."""
    segments = name.split(".")
    for i, segment in enumerate(segments):
        if segment.isdecimal():
            return ".".join((*segments[:i], "*", *segments[i + 1 :])), int(segment)
    return None
