"""Which sites a reader means, and a refusal with near names for those that are not there."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from telemetry.errors import FieldUnknownError, KindUnknownError, SiteUnknownError

__all__ = ["as_names", "matching", "require_fields", "select_series"]


def as_names(names: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the names as a tuple; one name may be given bare, and None stands for all."""
    return (names,) if isinstance(names, str) else None if names is None else tuple(names)


def matching(series: pa.Table, select: str | None) -> pa.Table:
    """Return the rows of a table of series whose site matches a glob; all of them for None."""
    if select is None:
        return series
    return series.filter(
        pa.array([fnmatch.fnmatchcase(name, select) for name in series["site"].to_pylist()], pa.bool_())
    )


def select_series(sites: pa.Table, names: tuple[str, ...] | None, kinds: tuple[str, ...] | None) -> NDArray[np.bool_]:
    """Return which rows of a table of series have one of ``names`` and one of ``kinds``.

    Raises:
        SiteUnknownError, KindUnknownError: a name, a kind, or the pair of them is not in the record.
    """
    all_names, all_kinds = sites["site"].to_pylist(), sites["kind"].to_pylist()
    for name in names or ():
        if name not in all_names:
            raise SiteUnknownError(
                f"the record has no site {name!r}{_near(name, all_names)}", site=name, remedy=".sites() lists them all"
            )
    for kind in kinds or ():
        if kind not in all_kinds:
            known = sorted(set(all_kinds))
            raise KindUnknownError(f"the record has no kind {kind!r}; there are {known}", remedy="use one of them")
    chosen = np.array(
        [
            (names is None or name in names) and (kinds is None or kind in kinds)
            for name, kind in zip(all_names, all_kinds, strict=True)
        ],
        dtype=bool,
    )
    if names and kinds and not chosen.any():
        there = sorted({kind for name, kind in zip(all_names, all_kinds, strict=True) if name in names})
        raise KindUnknownError(
            f"site {names[0]!r} has no kind {kinds[0]!r}; it has {there}", site=names[0], remedy="use one of them"
        )
    return chosen


def require_fields(asked: Sequence[str], known: Iterable[str]) -> None:
    """Raise :class:`FieldUnknownError` unless every name is known."""
    there = tuple(known)
    for name in asked:
        if name not in there:
            raise FieldUnknownError(
                f"there is no field {name!r}{_near(name, there)}", remedy=f"use one of {', '.join(there)}"
            )


def _near(name: str, there: Iterable[str]) -> str:
    names = list(dict.fromkeys(there))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    near = near or [known for known in names if name in known or known in name][:3]
    return f"; near it: {', '.join(near)}" if near else ""
