"""Mixed precision: what the scaler did is read from the scaler, and gradient rows say how they relate to it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import telemetry
from telemetry.presence import Presence
from telemetry.summary import summarize
from tests.aggregators import KeepingAggregator

WEIGHTS = ("parameters", "gradients", "updates")


def run(values, *, make_optimizer=torch.optim.SGD, through_scaler=True, zero_first=True, scale=1024.0, **amp):
    """Train one step for each value; an infinite one makes the gradients non-finite."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    optimizer, kept = make_optimizer(model.parameters(), lr=0.125), KeepingAggregator()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **amp)
    unscaled, before = [], []
    with telemetry.watch(model, to=kept, optimizer=optimizer, signals=WEIGHTS, every=1) as session:
        for step, value in enumerate(values, start=1):
            with session.step(step, scaler=scaler):
                if zero_first:
                    optimizer.zero_grad()
                loss = model(torch.tensor([[value, 0.3]])).square().sum()
                scaler.scale(loss).backward()
                unscaled.append(model.weight.grad.double() / scaler.get_scale())
                before.append(model.weight.detach().clone())
                if through_scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                if not zero_first:
                    optimizer.zero_grad()
    return kept, unscaled, before, model


def facts(kept):
    return [(p.facts.num_applied, p.facts.num_skipped, p.facts.num_unknown) for p in kept.packets]


def test_an_infinite_gradient_makes_the_step_skipped_and_leaves_no_update():
    kept, _, _, _ = run([1.0, math.inf, 1.0])
    assert facts(kept) == [(1, 0, 0), (0, 1, 0), (1, 0, 0)]
    presence, reason = kept.presence("update", "weight", 2)
    assert presence is Presence.SITE_ABSENT
    assert reason == "skipped: the scaler found non-finite gradients"
    assert kept.summary("gradient", "weight", 2).finite < 6
    assert kept.packets[1].facts.skipped_ranks == (0,)


@pytest.mark.parametrize("zero_first", [True, False])
def test_a_skip_is_known_whenever_the_loop_zeroes_its_gradients(zero_first):
    kept, _, _, _ = run([1.0, math.inf, 1.0], zero_first=zero_first)
    assert [row[1] for row in facts(kept)] == [0, 1, 0]


def test_gradients_that_the_scaler_has_unscaled_are_observed():
    kept, unscaled, _, _ = run([1.0, 2.0])
    for step, packet in enumerate(kept.packets, start=1):
        assert packet.facts.grad_scale_state == "observed"
        assert kept.summary("gradient", "weight", step).sum_sq == float((unscaled[step - 1] ** 2).sum())


def test_gradients_that_nobody_unscaled_are_derived_bit_for_bit():
    kept, unscaled, _, _ = run([1.0], through_scaler=False)
    assert kept.packets[0].facts.grad_scale_state == "derived"
    assert kept.summary("gradient", "weight", 1) == summarize(unscaled[0].float(), histogram=True)


def test_a_scale_that_is_no_power_of_two_is_shipped_as_measured_and_called_unknown():
    kept, unscaled, _, _ = run([1.0], through_scaler=False, scale=1000.0)
    assert kept.packets[0].facts.grad_scale_state == "unknown"
    assert kept.summary("gradient", "weight", 1).sum == pytest.approx(1000 * float(unscaled[0].sum()), rel=1e-6)


def test_the_recorded_scale_is_that_of_the_backward_also_where_the_scaler_grows_it():
    kept, _, _, _ = run([1.0, 1.0, 1.0], scale=8.0, growth_interval=1)
    assert [packet.facts.grad_scale for packet in kept.packets] == [8.0, 16.0, 32.0]


def test_a_fused_optimizer_that_unscales_by_itself_is_derived_and_its_skip_is_known():
    def fused(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    kept, unscaled, _, _ = run([1.0, math.inf, 1.0], make_optimizer=fused)
    assert [packet.facts.grad_scale_state for packet in kept.packets] == ["derived"] * 3
    assert kept.summary("gradient", "weight", 1) == summarize(unscaled[0].float(), histogram=True)
    assert [row[1] for row in facts(kept)] == [0, 1, 0]
    assert kept.presence("update", "weight", 2)[0] is Presence.SITE_ABSENT


def test_without_a_scaler_nothing_is_claimed():
    model, kept = nn.Linear(2, 1), KeepingAggregator()
    with telemetry.watch(model, to=kept, every=1) as session, session.step(1):
        model(torch.ones(1, 2)).sum().backward()
    assert (kept.packets[0].facts.grad_scale, kept.packets[0].facts.grad_scale_state) == (None, "no_scaler")


def test_a_disabled_scaler_is_none():
    kept, _, _, _ = run([1.0], enabled=False)
    assert kept.packets[0].facts.grad_scale_state == "no_scaler"


class Opaque:
    """Somebody's own scaler, which tells nothing."""

    def is_enabled(self):
        return True


def test_a_scaler_that_cannot_be_read_is_unknown_and_training_goes_on():
    model, kept = nn.Linear(2, 1), KeepingAggregator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with telemetry.watch(model, to=kept, optimizer=optimizer, every=1) as session, session.step(1, scaler=Opaque()):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert kept.packets[0].facts.grad_scale_state == "unknown"
    assert facts(kept) == [(1, 0, 0)]
