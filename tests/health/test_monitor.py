"""The stream of findings is bounded, deterministic, in the record, and off by one argument."""

import json
import math
from dataclasses import replace

import pytest
import torch

from aggregator import open_history
from aggregator.collective import CollectiveAggregator
from aggregator.health import HealthMonitor, Thresholds
from aggregator.health.check import Check
from aggregator.health.monitor import HEALTH_CHECKS
from aggregator.sinks import JsonlSink
from aggregator.sinks.jsonl import read_lines
from aggregator.testing import make_packet, make_site, make_steps
from telemetry.errors import ConfigurationError
from telemetry.protocol import AttachOffer
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize
from tests.health.streams import findings_of, weight

BROKEN = summarize(torch.tensor([1.0, math.nan]))


def test_a_thousand_sites_in_trouble_make_one_finding_with_eight_of_them():
    sites = [make_site(f"layers.{i}") for i in range(1000)]
    observed = {site: [math.nan] for site in sites}
    (finding,) = findings_of({1: observed, 2: observed}, sites=sites)
    assert (finding["num_sites"], len(finding["sites"])) == (1000, 8)
    assert "and 999 more sites" in finding["message"]
    assert len(json.dumps(finding, allow_nan=False)) < 4000


def test_the_same_steps_give_the_same_findings():
    steps = {
        n: {make_site(f"h.{i}"): [0.0, 0.0] for i in range(5)} | {weight("a.0", "gradient"): [math.inf]}
        for n in range(1, 9)
    }
    assert findings_of(steps) == findings_of(steps) != []


def test_what_is_remembered_is_bounded_by_the_sites():
    monitor = HealthMonitor(Thresholds())
    site = make_site("flapping")
    packets = [make_packet(n, {site: BROKEN if n % 2 else summarize(torch.ones(2))}) for n in range(1, 200)]
    for step in make_steps(packets):
        monitor.examine(step)
    assert all(len(episodes) <= 1 for episodes in monitor._checks.values())


def test_a_check_that_fails_says_so_once_and_leaves_the_others_running():
    def fail(*_):
        raise ZeroDivisionError("oops")

    broken = Check("broken", fail, str, (), is_immediate=True)
    monitor = HealthMonitor(Thresholds(), checks=(broken, *HEALTH_CHECKS))
    packets = [make_packet(n, {make_site("w"): BROKEN}) for n in (1, 2)]
    first, second = (monitor.examine(step) for step in make_steps(packets))
    assert [finding["code"] for finding in first.packet.findings] == ["health_check_failed", "nonfinite_values"]
    assert "ZeroDivisionError: oops" in first.packet.findings[0]["message"]
    assert second.packet.findings == ()


def _run(path, health, sinks=()):
    aggregator = CollectiveAggregator()
    site = make_site("w")
    reply = aggregator.attach(
        AttachOffer(0, 1, str(path), {"name": "x"}, DEFAULT_DESCRIPTOR, sites=(site,), health=health, sinks=sinks)
    )
    for number in (1, 2):
        packet = make_packet(number, {site: BROKEN})
        aggregator.submit(replace(packet, run_id=reply.run_id, segment=reply.segment))
    return aggregator.close()


def test_findings_reach_the_history_the_sinks_and_the_report(tmp_path):
    report = _run(tmp_path / "run", True, [JsonlSink(tmp_path / "record.jsonl")])
    history = open_history(tmp_path / "run")
    assert [row["code"] for row in history.findings().to_pylist()] == ["nonfinite_values"]
    assert [row["rank"] for row in history.findings().to_pylist()] == [0]
    assert [line["code"] for line in read_lines(tmp_path / "record.jsonl") if line["type"] == "finding"] == [
        "nonfinite_values"
    ]
    assert [finding["code"] for finding in report.findings] == ["nonfinite_values"]
    assert history.manifest["run"]["health"]["gradient_ratio"] == 100.0


def test_health_false_turns_all_of_them_off_and_the_record_says_so(tmp_path):
    assert _run(tmp_path / "run", False).findings == ()
    history = open_history(tmp_path / "run")
    assert history.findings().num_rows == 0
    assert history.manifest["run"]["health"] is None


def test_thresholds_that_cannot_be_are_refused(tmp_path):
    for changes in ({"gradient_ratio": 1.0}, {"confirm_observations": 0}, {"update_ratio_low": 1.0}):
        with pytest.raises(ConfigurationError, match=next(iter(changes))):
            Thresholds(**changes)
    with pytest.raises(ConfigurationError, match="health is 'on'"):
        _run(tmp_path / "run", "on")
    assert not (tmp_path / "run").exists()
