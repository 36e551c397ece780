"""Findings as a person reads them: each once, with how often it was made, and with the numbers that support it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from aggregator.history import History
from telemetry.errors import HistoryError

__all__ = ["FoundOnce", "read_findings"]

MAX_SHOWN: Final = 50
_COUNTS: Final = ("total", "finite", "nan", "pos_inf", "neg_inf", "zero")
_OBSERVED: Final = (*_COUNTS, "rms", "absmax", "absmax_rank", "first_nonfinite_rank", "replicas", "presence", "reason")
# Said by the message, by the place of the finding, or by a table of its own.
_LEFT_OUT: Final = frozenset({"code", "message", "step", "site", "kind", "rank", "sites", "thresholds"})


@dataclass(frozen=True)
class FoundOnce:
    """One finding over all steps at which it was made.

    Attributes:
        code, message, site, kind: as first made; site and kind are None where it is about no one site.
        steps: at which it was made, ascending.
        details: what the finding itself says, by name.
        observed: the row of the site at the first of these steps, by name; empty where there is none.
        series: ``(step, value)`` of the site's rms over all steps, None where there was no number.
    """

    code: str
    message: str
    site: str | None
    kind: str | None
    steps: tuple[int, ...]
    details: Mapping[str, Any]
    observed: Mapping[str, Any]
    series: tuple[tuple[int, float | None], ...]


def read_findings(history: History) -> list[FoundOnce]:
    """Return each finding once, in the order of the first step; the first 50 with the numbers around them.

    Two are the same if code, site, kind and the ranks that are named are.
    """
    found: dict[tuple[Any, ...], FoundOnce] = {}
    for row in history.findings().to_pylist():
        details = json.loads(row["details"])
        key = row["code"], row["site"], details.get("kind"), row["rank"], tuple(details.get("ranks") or ())
        known = found.get(key)
        if known is not None:
            found[key] = replace(known, steps=(*known.steps, row["step"]))
            continue
        told = {name: value for name, value in details.items() if name not in _LEFT_OUT}
        told = told if row["rank"] is None else {"rank": row["rank"], **told}
        found[key] = FoundOnce(
            row["code"], row["message"], row["site"], details.get("kind"), (row["step"],), told, {}, ()
        )
    first = sorted(found.values(), key=lambda finding: finding.steps[0])
    return [_with_numbers(history, finding) if i < MAX_SHOWN else finding for i, finding in enumerate(first)]


def _with_numbers(history: History, finding: FoundOnce) -> FoundOnce:
    if finding.site is None or finding.kind is None:
        return finding
    step = finding.steps[0]
    try:
        rows = history.observations(finding.site, finding.kind, range(step, step + 1), _OBSERVED).to_pylist()
        series = history.series(finding.site, finding.kind, "rms")
    except HistoryError:
        # The site was never defined, or its rows are damaged: the finding itself still stands.
        return finding
    points = tuple(zip(series["step"].to_pylist(), series["value"].to_pylist(), strict=True))
    return replace(finding, observed=rows[-1] if rows else {}, series=points)
