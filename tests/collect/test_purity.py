"""Observed training is the unobserved one, bit for bit, and the model stays an ordinary model."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import telemetry
from tests.aggregators import KeepingAggregator


class Net(nn.Module):
    """Everything that could give an observer away: batch norm buffers, dropout's random numbers, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.norm(self.embed(tokens))))


def train(watched: bool, steps: int = 6):
    torch.manual_seed(7)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = telemetry.watch(model, to=KeepingAggregator(), optimizer=optimizer, every=2) if watched else None
    losses = []
    for step in range(1, steps + 1):
        with session.step(step) if session else torch.enable_grad():
            tokens = torch.randint(16, (12,))
            loss = nn.functional.cross_entropy(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if session:
        session.close()
    return losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()


def test_losses_parameters_buffers_optimizer_state_and_random_numbers_are_the_same():
    plain, observed = train(False), train(True)
    assert plain[0] == observed[0]
    assert list(plain[1]) == list(observed[1])
    assert all(torch.equal(plain[1][key], observed[1][key]) for key in plain[1])
    for a, b in zip(plain[2]["state"].values(), observed[2]["state"].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)
    assert torch.equal(plain[3], observed[3])


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


def test_between_due_steps_the_model_carries_nothing():
    model = Net()
    with telemetry.watch(model, to=KeepingAggregator(), every=5) as session:
        for step in range(1, 4):
            with session.step(step):
                assert hooks_of(model) == (0 if step > 1 else hooks_of(model))
            assert hooks_of(model) == 0


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_made_inside_of_a_due_step_works_and_reports_nothing(copier):
    model, kept = Net(), KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("activations",), every=1) as session, session.step(1):
        assert hooks_of(model) > 0
        duplicate = copier(model)
        duplicate(torch.arange(4))
        model(torch.arange(4))
    assert kept.summary("activation", "norm", 1).calls == 1
    torch.save(model.state_dict(), io.BytesIO())


class Stop(Exception):
    pass


def test_a_step_that_raises_records_nothing_and_leaves_no_hook():
    model, kept = Net(), KeepingAggregator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with telemetry.watch(model, to=kept, optimizer=optimizer, every=1) as session:
        with pytest.raises(Stop), session.step(1):
            model(torch.arange(4)).sum().backward()
            raise Stop
        assert hooks_of(model) == 0
        with session.step(1):
            optimizer.zero_grad()
            model(torch.arange(4)).sum().backward()
            optimizer.step()
    assert kept.steps == [1]
    assert kept.summary("activation", "norm", 1).calls == 1


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_an_exception_that_ends_the_session_leaves_no_hook_and_is_not_masked(error):
    model, kept = Net(), KeepingAggregator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error), telemetry.watch(model, to=kept, optimizer=optimizer, every=1) as session:
        with session.step(1):
            model(torch.arange(4))
        with session.step(2):
            raise error
    assert hooks_of(model) == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert kept.num_closed == 1
    assert kept.steps == [1]


def test_a_late_backward_after_its_step_is_silent():
    model, kept = Net(), KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("activation_grads",), every=1) as session:
        with session.step(1):
            loss = model(torch.arange(4)).sum()
        loss.backward()
        with session.step(2):
            pass
    assert session.report.observations.keys() == {("activation_grad", telemetry.Presence.SITE_ABSENT)}


def test_the_same_model_can_be_watched_again_after_its_session_has_closed():
    model = Net()
    for _ in range(2):
        with telemetry.watch(model, to=KeepingAggregator(), every=1) as session, session.step(1):
            model(torch.arange(4))
