"""Parameters, gradients and updates at the optimizer boundary, on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import telemetry
from telemetry.presence import Presence
from telemetry.summary import summarize
from tests.aggregators import KeepingAggregator

WEIGHTS = ("parameters", "gradients", "updates")


def train(model, optimizers, *, steps=1, watch_optimizers=True, between=None, **options):
    kept = KeepingAggregator()
    options = {"signals": WEIGHTS, "every": 1, **options}
    given = optimizers if watch_optimizers else None
    with telemetry.watch(model, to=kept, optimizer=given, **options) as session:
        for step in range(1, steps + 1):
            with session.step(step):
                model(torch.ones(4, next(model.parameters()).shape[1])).square().sum().backward()
                if between is not None:
                    between()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return kept


def test_the_update_is_what_the_step_changed():
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    kept = train(model, [torch.optim.AdamW(model.parameters())])
    expected = summarize(model.weight.detach().double() - before.double(), histogram=True)
    assert kept.summary("update", "weight", 1) == expected


def test_gradients_are_read_before_the_loop_zeroes_them():
    model = nn.Linear(3, 2)
    seen = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.update(weight=model.weight.grad.clone()))
    kept = train(model, [optimizer])
    assert kept.summary("gradient", "weight", 1) == summarize(seen["weight"], histogram=True)


def test_without_an_optimizer_the_step_scope_is_the_boundary():
    model = nn.Linear(3, 2)
    before = model.bias.detach().clone()
    kept = train(model, [torch.optim.SGD(model.parameters(), lr=0.1)], watch_optimizers=False)
    assert kept.summary("update", "bias", 1) == summarize(
        model.bias.detach().double() - before.double(), histogram=True
    )
    # zero_grad has run inside of the scope, so there is no gradient left to see, and the row says that.
    assert kept.presence("gradient", "bias", 1) == (Presence.SITE_ABSENT, "the gradient is None")


def test_an_update_that_bfloat16_cannot_hold_is_zero():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 0.02)
    kept = KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("updates",), every=1) as session, session.step(1), torch.no_grad():
        model.weight += 3e-6
    summary = kept.summary("update", "weight", 1)
    assert (summary.absmax, summary.zero_fraction) == (0.0, 1.0)


def test_a_frozen_parameter_and_a_missing_gradient_have_rows_that_say_so():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "frozen": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    kept = KeepingAggregator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with telemetry.watch(model, to=kept, optimizer=optimizer, signals=WEIGHTS, every=1) as session, session.step(1):
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert kept.presence("gradient", "frozen.weight", 1) == (Presence.SITE_ABSENT, "requires_grad is False")
    assert kept.presence("gradient", "idle.weight", 1) == (Presence.SITE_ABSENT, "the gradient is None")
    assert kept.presence("parameter", "frozen.weight", 1)[0] is Presence.OBSERVED
    assert kept.presence("update", "frozen.weight", 1) == (Presence.SITE_ABSENT, "requires_grad is False")


def test_a_large_parameter_is_followed_on_a_marked_sample_that_is_always_the_same():
    model = nn.Linear(128, 64)
    sampled = [train(model, [torch.optim.SGD(model.parameters(), lr=0.0)]) for _ in range(2)]
    for kept in sampled:
        spec = kept.sites()["update", "weight"]
        assert (spec.estimated, spec.numel) == (True, 8192)
        assert kept.summary("update", "weight", 1).total == 4096
        assert not kept.sites()["update", "bias"].estimated
    whole = train(model, [torch.optim.SGD(model.parameters(), lr=0.0)], full_updates=True)
    assert whole.summary("update", "weight", 1).total == 8192
    assert not whole.sites()["update", "weight"].estimated


def test_sampling_leaves_the_global_random_state_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    telemetry.watch(nn.Linear(1, 1), to=KeepingAggregator()).close()
    torch.set_rng_state(state)
    model = nn.Linear(128, 64)
    after = torch.get_rng_state()
    telemetry.watch(model, to=KeepingAggregator()).close()
    assert torch.equal(after, torch.get_rng_state())


def test_two_optimizers_each_bring_their_own_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    kept = train(model, optimizers, steps=2)
    assert kept.packets[-1].facts.num_optimizer_steps == 2
    for name in ("0.weight", "1.weight"):
        assert kept.summary("gradient", name, 2).calls == 1
        assert kept.summary("update", name, 2).absmax > 0


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.LBFGS, {"max_iter": 1}), (torch.optim.LBFGS, {"max_iter": 5})],
)
def test_an_optimizer_with_a_closure_shows_the_gradient_of_its_first_call_and_the_whole_update(
    optimizer_class, options, by_name
):
    model = nn.Linear(2, 1)
    optimizer, kept = optimizer_class(model.parameters(), **options), KeepingAggregator()
    calls, updates = [], []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.full((3, 2), float(step))).square().sum()
        loss.backward()
        calls.append(model.weight.grad.clone())
        return loss

    with telemetry.watch(model, to=kept, optimizer=optimizer, signals=WEIGHTS, every=1) as session:
        for step in (1, 2, 3):
            calls.clear()
            before = model.weight.detach().clone()
            with session.step(step):
                # What the step before has left in .grad is not of this step.
                optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            updates.append(model.weight.detach().double() - before.double())
            assert kept.summary("gradient", "weight", step) == summarize(calls[0], histogram=step == 1)
            assert kept.summary("update", "weight", step) == summarize(updates[-1], histogram=step == 1)
            assert kept.packets[-1].facts.num_applied == 1


def test_tied_parameters_are_one_site_with_both_names():
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    kept = KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("parameters",), every=1) as session, session.step(1):
        pass
    assert kept.rows(1) == {("parameter", "embedding.weight")}
    assert kept.sites()["parameter", "embedding.weight"].aliases == ("head.weight",)


def test_gradient_accumulation_has_one_row_with_one_call():
    model = nn.Linear(2, 1)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), KeepingAggregator()
    with telemetry.watch(model, to=kept, optimizer=optimizer, every=1) as session:
        for step in range(1, 9):
            with session.step(step):
                for _ in range(8):
                    model(torch.ones(4, 2)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert kept.steps == list(range(1, 9))
    assert {kept.summary("gradient", "weight", step).calls for step in kept.steps} == {1}
    assert {packet.facts.num_micro_batches for packet in kept.packets} == {8}


def test_gradients_before_and_after_clipping_are_two_stages():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), KeepingAggregator()
    with telemetry.watch(model, to=kept, optimizer=optimizer, signals=WEIGHTS, every=2) as session:
        for step in (1, 2, 3):
            with session.step(step) as scope:
                optimizer.zero_grad()
                model(torch.full((4, 3), 9.0)).square().sum().backward()
                scope.before_clipping()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
    assert kept.steps == [1, 2]
    before, after = (
        sum(kept.summary(kind, name, 2).sum_sq for name in ("weight", "bias")) ** 0.5
        for kind in ("gradient_pre_clip", "gradient")
    )
    assert after == pytest.approx(0.5, rel=1e-4)
    assert before > 10


def test_a_sparse_gradient_shows_its_logical_elements_and_its_stored_ones():
    model = nn.Embedding(1000, 4, sparse=True)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), KeepingAggregator()
    with telemetry.watch(model, to=kept, optimizer=optimizer, signals=WEIGHTS, every=1) as session, session.step(1):
        model(torch.tensor([3, 7, 7, 900])).square().sum().backward()
        optimizer.step()
    logical, stored = (kept.summary(kind, "weight", 1) for kind in ("gradient", "gradient_stored"))
    assert (logical.total, logical.zero, stored.total) == (4000, 3988, 12)
    assert logical.sum_sq == stored.sum_sq > 0
    assert logical.mean == pytest.approx(stored.sum / 4000)
    assert logical.histogram.total == 4000


def test_a_lazy_module_is_followed_from_its_first_step_on():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    kept = KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("parameters", "gradients"), every=1) as session:
        for step in (1, 2):
            with session.step(step):
                model(torch.ones(2, 5)).sum().backward()
    assert ("parameter", "0.weight") not in kept.rows(1)
    assert kept.summary("gradient", "0.weight", 2).total == 15


def test_a_parameter_that_is_unfrozen_has_an_update_from_then_on():
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    optimizer, kept = torch.optim.SGD([model.bias], lr=0.1), KeepingAggregator()
    with telemetry.watch(model, to=kept, optimizer=optimizer, signals=WEIGHTS, every=1) as session:
        for step in range(1, 5):
            if step == 3:
                model.weight.requires_grad_(True)
                optimizer.add_param_group({"params": [model.weight]})
            with session.step(step):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    assert kept.presence("update", "weight", 2)[0] is Presence.SITE_ABSENT
    assert kept.summary("update", "weight", 3).absmax > 0
    assert kept.summary("gradient", "weight", 4).total == 2


@pytest.mark.parametrize("device", ["meta"])
def test_a_parameter_without_data_is_unsupported(device):
    model = nn.Linear(2, 2, device=device)
    kept = KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("parameters",), every=1) as session, session.step(1):
        pass
    assert kept.presence("parameter", "weight", 1)[0] is Presence.UNSUPPORTED
