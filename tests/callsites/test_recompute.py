"""Activation checkpointing runs forwards twice; they are observed once, and gradients are those without us."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import telemetry
from tests.aggregators import KeepingAggregator


def save_products(context, operator, *args, **kwargs) -> CheckpointPolicy:
    """Save matrix products and everything elementwise that our own reduction would use as well."""
    saved = (torch.ops.aten.addmm.default, torch.ops.aten.mul.Tensor, torch.ops.aten.abs.default)
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE


def save_everything(context, operator, *args, **kwargs) -> CheckpointPolicy:
    # What is changed in place, as dropout does with its mask, cannot be saved, with or without us.
    mutable = operator._schema.is_mutable or operator is torch.ops.aten.empty_like.default
    return CheckpointPolicy.PREFER_RECOMPUTE if mutable else CheckpointPolicy.MUST_SAVE


def selective(policy):
    return partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


FLAVOURS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "reentrant without rng": partial(checkpoint, use_reentrant=True, preserve_rng_state=False),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "non-reentrant without rng": partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    "non-reentrant without early stop": partial(checkpoint, use_reentrant=False, early_stop=False),
    "selective": selective(save_products),
    "selective, all saved": selective(save_everything),
}
if "early_stop" not in inspect.signature(checkpoint).parameters:
    del FLAVOURS["non-reentrant without early stop"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu, self.dropout = nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.relu(self.linear(x)))
        telemetry.observe_tensor(self, "inner", "inner", y)
        with torch.no_grad():
            telemetry.observe_tensor(self, "detached", "inner", y.detach() * 2)
        return y * y.abs()


class Net(nn.Module):
    """Three blocks, checkpointed one by one and, if ``outer`` is given, together as well."""

    def __init__(self, inner, outer=None) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.inner(block, x) if self.inner else block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.run, x) if self.outer else self.run(x)


def train(model: nn.Module, kept: KeepingAggregator | None, steps: int = 3):
    """Train with two micro-batches a step; every step is due."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = None
    if kept is not None:
        options = {"signals": telemetry.SIGNALS, "call_sites": ("inner",), "every": 1}
        session = telemetry.watch(model, to=kept, optimizer=optimizer, **options)
    losses = []
    for step in range(1, steps + 1):
        with session.step(step) if session else torch.enable_grad():
            for _ in range(2):
                loss = model(torch.randn(16, 4, requires_grad=True)).sum()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    if session:
        session.close()
    return losses, [p.detach() for p in model.parameters()], torch.get_rng_state()


def twins(*ways):
    torch.manual_seed(1)
    model = Net(*ways)
    torch.manual_seed(1)
    return model, Net(*ways)


def assert_same(plain, observed) -> None:
    assert plain[0] == observed[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], observed[1], strict=True))
    assert torch.equal(plain[2], observed[2])


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_each_logical_forward_is_observed_once_and_training_is_bit_for_bit_the_same(flavour):
    plain, watched = twins(FLAVOURS[flavour])
    kept = KeepingAggregator()
    assert_same(train(plain, None), train(watched, kept))
    assert_observed_once(kept)


@pytest.mark.parametrize("outer", ["reentrant", "non-reentrant", "selective"])
@pytest.mark.parametrize("inner", ["reentrant", "non-reentrant"])
def test_nested_checkpoints_are_observed_once(inner, outer):
    plain, watched = twins(FLAVOURS[inner], FLAVOURS[outer])
    kept = KeepingAggregator()
    assert_same(train(plain, None), train(watched, kept))
    assert_observed_once(kept)


def assert_observed_once(kept: KeepingAggregator) -> None:
    for step in (1, 2, 3):
        assert kept.packets[step - 1].facts.num_micro_batches == 2
        for block in range(3):
            sites = [("activation", f"blocks.{block}.relu"), ("activation_grad", f"blocks.{block}.relu")]
            sites += [("inner", f"blocks.{block}.{name}") for name in ("inner", "detached")]
            for kind, name in sites:
                summary = kept.summary(kind, name, step)
                assert (summary.calls, summary.total) == (2, 128), (kind, name)


def test_what_is_observed_under_a_checkpoint_is_what_is_observed_without_one():
    rows = []
    for way in (None, FLAVOURS["reentrant"], FLAVOURS["selective"]):
        torch.manual_seed(1)
        kept = KeepingAggregator()
        train(Net(way), kept)
        packet = kept.packets[-1]
        # Later blocks run backward first in all of them, micro-batches in order: the same numbers in the same order.
        rows.append((packet.sites.tolist(), packet.ints.tolist(), packet.floats.tolist()))
    assert rows[0] == rows[1] == rows[2]
