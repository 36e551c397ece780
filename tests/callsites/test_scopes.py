"""Call sites as Megatron defines them: scopes, kinds, suspension, residuals."""

from __future__ import annotations

import threading
from contextvars import copy_context
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from telemetry import (
    capture_tensor_observations,
    is_observing_tensor,
    observe_layer_residuals,
    observe_tensor,
    suspend_tensor_observations,
)


class Keeping:
    """An observer that keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, owner, name, source_kind, tensor, tp_shard_dim, sequence_dim, batch_dim) -> None:
        self.calls.append((owner, name, source_kind, tensor.clone(), tp_shard_dim, sequence_dim, batch_dim))

    @property
    def names(self) -> list[str]:
        return [call[1] for call in self.calls]


def show(name: str, kind: str = "logits", tensor=None, **dims) -> None:
    observe_tensor(None, name, kind, torch.ones(1) if tensor is None else tensor, **dims)


def test_an_observer_gets_the_kinds_it_asked_for_with_all_seven_arguments():
    keeping, owner = Keeping(), object()
    with capture_tensor_observations(keeping, frozenset({"logits"})):
        observe_tensor(owner, "a", "logits", torch.tensor([2.0]), tp_shard_dim=-1, sequence_dim=0, batch_dim=1)
        show("b", "router_scores")
    (call,) = keeping.calls
    assert (call[0], *call[1:3], call[3].item(), *call[4:]) == (owner, "a", "logits", 2.0, -1, 0, 1)


def test_outside_of_a_scope_nothing_is_called_and_after_it_nothing_is_again():
    keeping = Keeping()
    show("before")
    with pytest.raises(KeyError), capture_tensor_observations(keeping, {"logits"}):
        show("inside")
        raise KeyError
    show("after")
    assert keeping.names == ["inside"]
    assert not is_observing_tensor("logits")


def test_the_innermost_scope_gets_a_call_alone_and_gives_the_outer_one_back():
    outer, inner = Keeping(), Keeping()
    with capture_tensor_observations(outer, {"logits", "scores"}):
        show("1")
        with capture_tensor_observations(inner, {"logits"}):
            show("2")
            show("3", "scores")
            assert not is_observing_tensor("scores")
        show("4", "scores")
    assert (outer.names, inner.names) == (["1", "4"], ["2"])


def test_a_suspended_scope_is_silent_until_the_suspension_ends():
    keeping = Keeping()
    with capture_tensor_observations(keeping, {"logits"}):
        with suspend_tensor_observations():
            show("silent")
            assert not is_observing_tensor("logits")
            with suspend_tensor_observations():
                pass
            show("still silent")
        show("heard")
    assert keeping.names == ["heard"]


def test_suspension_wins_inside_of_a_restored_copy_of_the_context():
    keeping = Keeping()
    with capture_tensor_observations(keeping, {"logits"}):
        context = copy_context()
        with suspend_tensor_observations():
            context.run(show, "restored within the suspension")

        def recompute() -> None:
            with suspend_tensor_observations():
                show("suspended within the restored context")

        context.run(recompute)
        context.run(show, "neither")
    assert keeping.names == ["neither"]


def test_a_suspension_that_was_copied_with_its_context_holds_there():
    keeping = Keeping()
    with capture_tensor_observations(keeping, {"logits"}):
        with suspend_tensor_observations():
            context = copy_context()
        context.run(show, "silent")
    assert keeping.names == []


def test_a_scope_belongs_to_the_thread_that_opened_it():
    keeping = Keeping()
    with capture_tensor_observations(keeping, {"logits"}):
        other = threading.Thread(target=show, args=("other",))
        other.start()
        other.join(10)
    assert keeping.names == []


def test_an_observer_of_older_megatron_gets_five_arguments():
    calls = []

    def observer(owner, name, source_kind, tensor, tp_shard_dim):
        calls.append((name, tp_shard_dim))

    with capture_tensor_observations(observer, {"logits"}):
        show("a", tp_shard_dim=2, sequence_dim=0, batch_dim=1)
    assert calls == [("a", 2)]


@pytest.mark.parametrize(("sequence_parallel", "tp_shard_dim"), [(True, 0), (False, None), (None, None)])
def test_residuals_show_the_accumulator_and_what_the_layer_adds_to_it(sequence_parallel, tp_shard_dim):
    layer = SimpleNamespace()
    if sequence_parallel is not None:
        layer.config = SimpleNamespace(sequence_parallel=sequence_parallel)
    accumulator = torch.tensor([1.0, 2.0], requires_grad=True)
    output = accumulator + torch.tensor([3.0, 5.0])
    keeping = Keeping()
    with capture_tensor_observations(keeping, {"residual_accumulator", "residual_contribution"}):
        observe_layer_residuals(layer, accumulator, output)
    first, second = keeping.calls
    assert keeping.names == ["residual_accumulator", "residual_contribution"]
    assert first[3].tolist() == [1.0, 2.0]
    assert (second[3].tolist(), second[3].requires_grad) == ([3.0, 5.0], False)
    assert first[4:] == second[4:] == (tp_shard_dim, 0, 1)


def test_the_contribution_is_not_computed_for_nobody():
    class Untouchable:
        def detach(self):
            raise AssertionError("read for nobody")

    keeping = Keeping()
    with capture_tensor_observations(keeping, {"residual_accumulator"}):
        observe_layer_residuals(SimpleNamespace(), torch.ones(2), Untouchable())
    assert keeping.names == ["residual_accumulator"]


def test_gradients_pass_a_call_site_as_if_it_were_not_there():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with capture_tensor_observations(Keeping(), {"logits"}):
        y = x * x
        show("y", tensor=y)
        y.sum().backward()
    assert x.grad.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("flavour", ["reentrant", "non-reentrant", "suspended by hand"])
def test_a_checkpointed_block_is_observed_once_and_its_gradients_are_those_without_us(flavour):
    keeping, runs = Keeping(), []

    def block(x):
        runs.append(torch.is_grad_enabled())
        y = x * x
        show("y", tensor=y)
        return y * 4

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with capture_tensor_observations(keeping, {"logits"}):
        if flavour == "suspended by hand":
            SuspendedRecompute.apply(block, x).sum().backward()
        else:
            checkpoint(block, x, use_reentrant=flavour == "reentrant").sum().backward()
    assert len(runs) == 2
    assert [call[3].tolist() for call in keeping.calls] == [[1.0, 4.0]]
    assert x.grad.tolist() == [8.0, 16.0]


class SuspendedRecompute(torch.autograd.Function):
    """A checkpoint as Megatron's: the forward runs without autograd, the recomputation suspends."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), suspend_tensor_observations():
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad
