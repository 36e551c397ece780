"""Where a reader that follows a run has come to, and what it gets each time."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from aggregator.history.plan import Views

__all__ = ["Cursor", "Followed", "newest_cursor"]


class Cursor(NamedTuple):
    """The last commit that was seen: plain numbers, to be kept anywhere."""

    segment: int
    step: int


class Followed(NamedTuple):
    """What is new.

    Attributes:
        steps, observations, findings: tables with ``segment`` and ``superseded``, from one and the same snapshot.
        cursor: for the next call; None while nothing is committed.
    """

    steps: pa.Table
    observations: pa.Table
    findings: pa.Table
    cursor: Cursor | None


def newest_cursor(views: Views, before: Cursor | None) -> Cursor | None:
    """Return the cursor of the newest commit in ``views``, ``before`` if there is none."""
    for view in reversed(views):
        if view.index is not None and view.index.last_step is not None:
            return Cursor(view.number, view.index.last_step)
    return before
