"""What every record asks of a step before it takes it: that it comes in order, and what its rows and new sites are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from aggregator.catalogue import MergedStep
from aggregator.history.encode import encode_findings, encode_observations, encode_sites, encode_step
from telemetry.errors import StepOrderError
from telemetry.sites import SiteSpec

__all__ = ["Intake"]


class Intake:
    """Takes the steps of one segment in. Used by one thread at a time."""

    def __init__(self, segment: int, resume_step: int | None) -> None:
        """Begin with nothing taken; ``resume_step`` is the first step that may come."""
        self._segment, self._resume_step = segment, resume_step
        self._newest_step: int | None = None
        self._known_sites: dict[int, SiteSpec] = {}
        self._known_rows: tuple[SiteSpec, ...] = ()

    def take(self, step: MergedStep, notices: Iterable[Mapping[str, Any]] = ()) -> dict[str, pa.Table]:
        """Return the rows of a step by table, with schemas ``SCHEMAS``.

        Args:
            step: the next one.
            notices: findings of the record itself, behind those of the step.

        Raises:
            StepOrderError: the step is not after the last one, or before the start of the segment; nothing changes.
        """
        self._require_order(step.step)
        fresh = self._undefined_sites(step)
        tables = {
            "steps": encode_step(step),
            "observations": encode_observations(step.packet),
            "sites": encode_sites(fresh, step.step),
            "findings": encode_findings((*step.packet.findings, *notices), step.step),
        }
        self._newest_step = step.step
        self._known_sites.update((site.site_id, site) for site in fresh)
        self._known_rows = step.sites
        return tables

    def _require_order(self, step: int) -> None:
        last, start = self._newest_step, self._resume_step
        if last is not None and step <= last:
            raise StepOrderError(
                f"step {step} was to follow step {last} in segment {self._segment}",
                step=step,
                remedy="step numbers must increase; a replay needs a new segment",
            )
        if start is not None and step < start:
            raise StepOrderError(
                f"segment {self._segment} begins at resume_step={start}",
                step=step,
                remedy="give the first step that is logged again as resume_step",
            )

    def _undefined_sites(self, step: MergedStep) -> list[SiteSpec]:
        """Return the sites whose definition is not yet stored as it is now; it may have gained names, or drifted."""
        # While rows stay the same, a catalogue names them with one and the same object.
        if step.sites is self._known_rows and not step.new_sites:
            return []
        named = zip(step.packet.sites.tolist(), step.sites, strict=True)
        found = {**{site.site_id: site for site in step.new_sites}, **dict(named)}
        return [site for key, site in found.items() if self._known_sites.get(key) != site]
