"""The first site with NaN or infinity is named with its rank, once."""

import math

import torch

from aggregator.health import HealthMonitor, Thresholds
from aggregator.merge import merge_packets
from aggregator.testing import make_packet, make_site, make_step
from telemetry.packet import StepFacts
from telemetry.presence import Presence
from telemetry.summary import summarize
from tests.health.streams import findings_of, told, weight

GOOD, BAD = [1.0, 2.0], [1.0, math.nan]
EMBED, LAYER, HEAD = (make_site(name) for name in ("embed", "layers.0", "head"))
MODEL_ORDER = (EMBED, LAYER, HEAD)


def test_the_rank_the_counts_and_the_step_are_in_the_finding():
    clean = {LAYER: summarize(torch.ones(3))}
    broken = {LAYER: summarize(torch.tensor([math.inf, -math.inf, math.nan, 1.0]))}
    packets = [make_packet(7, broken if rank in (2, 3) else clean, rank=rank, world_size=4) for rank in range(4)]
    step = HealthMonitor(Thresholds()).examine(make_step(merge_packets(packets)))
    (finding,) = step.packet.findings
    assert (finding["code"], finding["step"], finding["rank"], finding["site"], finding["kind"]) == (
        "nonfinite_values",
        7,
        2,
        "layers.0",
        "activation",
    )
    (named,) = finding["sites"]
    assert (named["num_ranks"], named["nan"], named["pos_inf"], named["neg_inf"], named["total"]) == (2, 2, 2, 2, 14)
    assert "2 NaN, 2 +inf, 2 -inf of 14 elements, first on rank 2 and 1 more" in finding["message"]


def test_the_first_activation_of_the_forward_pass_is_named_and_the_rest_counted():
    (finding,) = findings_of({1: {HEAD: BAD, EMBED: GOOD, LAYER: BAD}}, sites=MODEL_ORDER)
    assert finding["site"] == "layers.0"
    assert [named["site"] for named in finding["sites"]] == ["layers.0", "head"]
    assert finding["num_sites"] == 2


def test_of_gradients_the_one_nearest_to_the_loss_is_named():
    sites = [weight(f"layers.{i}.w", "gradient") for i in range(3)]
    (finding,) = findings_of({1: {sites[0]: BAD, sites[1]: BAD, sites[2]: GOOD}}, sites=sites)
    assert finding["site"] == "layers.1.w"


def test_what_a_step_computes_first_comes_first():
    parameter, gradient = weight("layers.0.w", "parameter"), weight("layers.0.w", "gradient")
    (finding,) = findings_of({1: {parameter: BAD, gradient: BAD, LAYER: BAD}}, sites=(parameter, gradient, LAYER))
    assert [named["kind"] for named in finding["sites"]] == ["activation", "gradient", "parameter"]


def test_a_skipped_optimizer_step_is_said_so_that_a_loss_scaler_alarms_nobody():
    gradient = weight("w", "gradient")
    (finding,) = findings_of({2: {gradient: BAD}}, facts={2: StepFacts(num_skipped=1, skipped_ranks=(0,))})
    assert finding["sites"][0]["num_skipped"] == 1
    assert "the optimizer step was skipped" in finding["message"]


def test_a_trouble_that_goes_on_is_told_once_then_again_with_a_count():
    limits = Thresholds(repeat_steps=5)
    findings = findings_of({step: {LAYER: BAD} for step in range(1, 13)}, limits)
    assert [(finding["step"], finding["sites"][0]["num_steps"]) for finding in findings] == [(1, 1), (6, 6), (11, 11)]
    assert "seen on 6 logged steps since step 1" in findings[1]["message"]


def test_it_is_told_anew_only_after_it_has_recovered():
    values = {1: BAD, 2: GOOD, 3: GOOD, 4: BAD, 5: GOOD, 6: GOOD, 7: GOOD, 8: BAD}
    findings = findings_of({step: {LAYER: value} for step, value in values.items()}, Thresholds(recover_observations=3))
    assert told(findings) == [("nonfinite_values", 1, "layers.0"), ("nonfinite_values", 8, "layers.0")]


def test_a_step_without_the_site_is_no_recovery():
    steps = {1: {LAYER: BAD}, **{step: {EMBED: GOOD} for step in range(2, 9)}, 9: {LAYER: BAD}}
    assert [finding["step"] for finding in findings_of(steps)] == [1]


def test_a_site_that_was_not_observed_is_not_judged():
    packet = make_packet(1, {}, unobserved={LAYER: (Presence.CAPTURE_FAILED, "broken")})
    step = make_step(packet)
    assert HealthMonitor(Thresholds()).examine(step) is step
