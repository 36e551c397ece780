"""Runs the built-in checks over the merged steps, in order, and makes findings of what they see.

At most one finding of a check in a step, however many sites are in trouble. Same steps in the same order, same
findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from aggregator.catalogue import MergedStep
from aggregator.health.check import Check, Verdict
from aggregator.health.dead_units import DEAD_UNITS
from aggregator.health.episodes import Episode, Episodes
from aggregator.health.gradient_flow import EXPLODING, VANISHING
from aggregator.health.nonfinite import NONFINITE
from aggregator.health.table import SiteTable
from aggregator.health.thresholds import Thresholds
from aggregator.health.update_size import UPDATE_TOO_LARGE, UPDATE_TOO_SMALL
from telemetry.sites import SiteSpec

__all__ = ["CHECK_FAILED", "HEALTH_CHECKS", "HealthMonitor"]

HEALTH_CHECKS: Final = (NONFINITE, EXPLODING, VANISHING, DEAD_UNITS, UPDATE_TOO_LARGE, UPDATE_TOO_SMALL)
CHECK_FAILED: Final = "health_check_failed"


class HealthMonitor:
    """The checks of one segment, with what they remember: for each check at most one small entry for each site.

    Used by one thread, which hands over each merged step once, in ascending order.
    """

    def __init__(
        self, thresholds: Thresholds, sites: Iterable[SiteSpec] = (), checks: Sequence[Check] = HEALTH_CHECKS
    ) -> None:
        """Make a monitor that has seen nothing.

        Args:
            thresholds: the limits.
            sites: those known before the first step, in the order of the model.
            checks: what to run.
        """
        self._thresholds = thresholds
        self._order: dict[int, int] = {}
        self._table: SiteTable | None = None
        self._table_ids = np.empty(0, np.uint64)
        self._learn(site.site_id for site in sites)
        self._checks = {
            check: Episodes(thresholds, confirm=1 if check.is_immediate else thresholds.confirm_observations)
            for check in checks
        }

    def examine(self, step: MergedStep) -> MergedStep:
        """Return the step with the findings of the checks behind those that it has. Never raises.

        A check that fails is left out from then on, and a finding says so: it must not cost the record.
        """
        table = self._table_of(step)
        findings = []
        for check, episodes in tuple(self._checks.items()):
            try:
                findings += self._findings(check, episodes, step, table)
            except Exception as error:
                del self._checks[check]
                findings.append(_failed(check, step, error))
        if not findings:
            return step
        return replace(step, packet=replace(step.packet, findings=(*step.packet.findings, *findings)))

    def _table_of(self, step: MergedStep) -> SiteTable:
        if self._table is None or not np.array_equal(step.packet.sites, self._table_ids):
            self._learn(site.site_id for site in step.new_sites)
            self._learn(step.packet.sites.tolist())
            self._table, self._table_ids = SiteTable.of(step.sites, self._order), step.packet.sites
        return self._table

    def _learn(self, site_ids: Iterable[int]) -> None:
        for site_id in site_ids:
            self._order.setdefault(site_id, len(self._order))

    def _findings(self, check: Check, episodes: Episodes, step: MergedStep, table: SiteTable) -> list[dict[str, Any]]:
        verdict = check.judge(step, table, self._thresholds)
        told = episodes.advance(step.step, verdict)
        return [self._finding(check, step, verdict, told)] if told else []

    def _finding(self, check: Check, step: MergedStep, verdict: Verdict, told: Mapping[int, Episode]) -> dict[str, Any]:
        sites = dict(zip(step.packet.sites.tolist(), step.sites, strict=True))
        named = [
            {
                "site": sites[site_id].name,
                "kind": sites[site_id].kind,
                "first_step": episode.first_step,
                "num_steps": episode.num_steps,
                **verdict.alarms[site_id],
            }
            for site_id, episode in tuple(told.items())[: self._thresholds.max_named_sites]
        ]
        first = named[0]
        limits = asdict(self._thresholds)
        return {
            "code": check.code,
            "message": f"{first['kind']} {first['site']}: {check.describe(first)}{_since(first)}{_others(len(told))}",
            "step": step.step,
            "site": first["site"],
            "kind": first["kind"],
            **({"rank": first["rank"]} if "rank" in first else {}),
            "num_sites": len(told),
            "sites": named,
            "thresholds": {name: limits[name] for name in check.limits},
        }


def _since(first: Mapping[str, Any]) -> str:
    return (
        f"; seen on {first['num_steps']} logged steps since step {first['first_step']}"
        if first["num_steps"] > 1
        else ""
    )


def _others(num_sites: int) -> str:
    return f"; and {num_sites - 1} more {'sites' if num_sites > 2 else 'site'}" if num_sites > 1 else ""


def _failed(check: Check, step: MergedStep, error: Exception) -> dict[str, Any]:
    return {
        "code": CHECK_FAILED,
        "message": f"the check {check.code} failed and is off from now on: {type(error).__name__}: {error}",
        "step": step.step,
        "check": check.code,
    }
