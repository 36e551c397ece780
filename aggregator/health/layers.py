"""Which sites are neighbours: the same part of the model in two layers that follow each other.

``layers.3.mlp.weight`` and ``layers.4.mlp.weight`` are neighbours; so are ``0.weight`` and ``2.weight`` of a sequence
whose part 1 has no such site. The layer is the first segment of a name that is a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from telemetry.sites import SiteSpec

__all__ = ["neighbours"]


def neighbours(rows: Iterable[int], sites: tuple[SiteSpec, ...]) -> list[tuple[int, int]]:
    """Return pairs of (row of a site, row of its next neighbour towards the output) among ``rows``."""
    parts: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in rows:
        if (place := _place(sites[row].name)) is not None:
            parts.setdefault((sites[row].kind, place[0]), []).append((place[1], row))
    return [(lower, upper) for layers in parts.values() for (_, lower), (_, upper) in pairwise(sorted(layers))]


@lru_cache(maxsize=1 << 16)
def _place(name: str) -> tuple[str, int] | None:
    """Return (name without the number of the layer, number), None where there is no number."""
    segments = name.split(".")
    for i, segment in enumerate(segments):
        if segment.isdecimal():
            return ".".join((*segments[:i], "*", *segments[i + 1 :])), int(segment)
    return None
