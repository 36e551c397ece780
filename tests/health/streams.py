"""Merged steps with numbers that a test chooses, and what the checks say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aggregator.health import HealthMonitor, Thresholds
from aggregator.testing import make_packet, make_site, make_steps
from telemetry.packet import StepFacts
from telemetry.sites import SiteSpec
from telemetry.summary import summarize


def weight(name: str, kind: str) -> SiteSpec:
    return make_site(name, kind, shape=(4, 4), placements=(("dp", "replica"),))


def findings_of(
    steps: Mapping[int, Mapping[SiteSpec, Sequence[float]]],
    thresholds: Thresholds | None = None,
    *,
    facts: Mapping[int, StepFacts] | None = None,
    sites: Sequence[SiteSpec] = (),
) -> list[dict[str, Any]]:
    """Return all findings of steps given as step → site → values."""
    monitor = HealthMonitor(thresholds or Thresholds(), sites)
    packets = [
        make_packet(
            number,
            {site: summarize(torch.tensor(values, dtype=torch.float64)) for site, values in observed.items()},
            facts=(facts or {}).get(number),
        )
        for number, observed in steps.items()
    ]
    return [dict(finding) for step in make_steps(packets) for finding in monitor.examine(step).packet.findings]


def told(findings: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, str]]:
    return [(finding["code"], finding["step"], finding["site"]) for finding in findings]
