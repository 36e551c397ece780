"""What a check of the stream is: a pure judgement of one step, and words for what it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aggregator.catalogue import MergedStep
from aggregator.health.table import SiteTable
from aggregator.health.thresholds import Thresholds

__all__ = ["Check", "Evidence", "Verdict"]

Evidence = Mapping[str, Any]
"""What a finding says of one site: JSON values, no NaN, no infinity."""


@dataclass(frozen=True)
class Verdict:
    """What one check says of one step.

    Attributes:
        judged: ids of the sites that had the numbers to be judged.
        alarms: id → evidence of those in trouble, the one to look at first in front.
    """

    judged: frozenset[int]
    alarms: Mapping[int, Evidence]


@dataclass(frozen=True)
class Check:
    """One built-in check.

    Attributes:
        code: of its findings.
        judge: (step, table of its sites, thresholds) → verdict; keeps no state.
        describe: evidence → the middle of a sentence that begins with kind and site.
        limits: names of the thresholds that decide.
        is_immediate: told at the first sight; otherwise after ``confirm_observations``.
    """

    code: str
    judge: Callable[[MergedStep, SiteTable, Thresholds], Verdict]
    describe: Callable[[Evidence], str]
    limits: tuple[str, ...]
    is_immediate: bool
