"""All that a report shows, read from the record once and kept small: what the page and the pictures are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aggregator.health.update_ratio import UPDATE_TO_WEIGHT
from aggregator.history import History
from aggregator.history.selection import require_fields
from aggregator.report.account import (
    Cost,
    ObservationAccount,
    RankCoverage,
    read_account,
    read_cost,
    read_coverage,
)
from aggregator.report.choice import MAX_COLUMNS, profile_kinds
from aggregator.report.evidence import FoundOnce, read_findings
from aggregator.report.grid import NONFINITE, Grid, Progress, Spans, read_grid, time_spans
from aggregator.report.ridges import MAX_RIDGES, Ridges, evenly_chosen, histogram_steps, read_ridges
from telemetry.summary import SUMMARY_FIELDS

__all__ = ["Contents", "read_contents"]

# Of a page: beyond, columns become wider. 3 million numbers are about 9 MB.
_MAX_NUMBERS: Final = 3_000_000
_MIN_COLUMNS: Final = 60


@dataclass(frozen=True, eq=False)
class Contents:
    """What was read.

    Attributes:
        history: the run, for its facts.
        field: of the first heat map.
        spans: how steps became columns.
        grids: kind → every field over time, the kinds in the order in which they are offered.
        profile: kinds of the depth profile.
        ridges: every site that has histograms.
        num_histogram_steps: steps of the run that have any, of which at most twelve are drawn.
        findings, coverage, account, cost: as read.
    """

    history: History
    field: str
    spans: Spans
    grids: dict[str, Grid]
    profile: tuple[str, ...]
    ridges: tuple[Ridges, ...]
    num_histogram_steps: int
    findings: tuple[FoundOnce, ...]
    coverage: RankCoverage
    account: ObservationAccount
    cost: Cost

    @property
    def has_ratio(self) -> bool:
        """Whether updates and parameters were both observed."""
        return {"update", "parameter"} <= set(self.grids)


def read_contents(history: History, field: str, progress: Progress | None = None) -> Contents:
    """Read a run for a report.

    Raises:
        FieldUnknownError: the record has no such field; names near ones.
    """
    fields = (*SUMMARY_FIELDS, NONFINITE)
    require_fields([field], fields)
    sites = history.sites()
    num_series = sites.num_rows
    affordable = _MAX_NUMBERS // max(1, num_series * len(fields))
    spans = time_spans(history, max(_MIN_COLUMNS, min(MAX_COLUMNS, affordable)))
    grids = {}
    kinds = _in_order(sites["kind"].to_pylist()) if spans.num_steps else []
    for number, kind in enumerate(kinds):
        wanted = (*fields, UPDATE_TO_WEIGHT) if kind == "update" else fields
        told = None if progress is None else _within(progress, number / (len(kinds) + 1), 1 / (len(kinds) + 1))
        grids[kind] = read_grid(history, kind, wanted, every=spans.every, progress=told)
    all_steps = histogram_steps(history)
    steps = evenly_chosen(all_steps, MAX_RIDGES)
    return Contents(
        history=history,
        field=field,
        spans=spans,
        grids=grids,
        profile=tuple(profile_kinds(history)) if grids else (),
        ridges=tuple(_ordered(read_ridges(history, steps), grids)) if steps else (),
        num_histogram_steps=len(all_steps),
        findings=tuple(read_findings(history)),
        coverage=read_coverage(history),
        account=read_account(history),
        cost=read_cost(history),
    )


def _within(progress: Progress, begin: float, share: float) -> Progress:
    return lambda doing, done: progress(doing, begin + share * done)


def _in_order(kinds: Sequence[str]) -> list[str]:
    """Put what flows through the model first, then what it learns with; call sites last."""
    known = ("activation", "activation_grad", "gradient", "update", "parameter")
    there = dict.fromkeys(kinds)
    return [*(kind for kind in known if kind in there), *(kind for kind in there if kind not in known)]


def _ordered(ridges: Sequence[Ridges], grids: dict[str, Grid]) -> list[Ridges]:
    kinds = list(grids)
    rows = {kind: {name: row for row, name in enumerate(grid.names)} for kind, grid in grids.items()}
    return sorted(ridges, key=lambda one: (kinds.index(one.kind), rows[one.kind].get(one.site, -1)))
