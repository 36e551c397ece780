"""Outputs of modules and their gradients, on one rank."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import telemetry
from telemetry.presence import Presence
from telemetry.summary import summarize
from tests.aggregators import KeepingAggregator


def observe(model: nn.Module, *batches: Tensor, loss=None, signals=("activations", "activation_grads"), **options):
    """Run one due step with a forward (and a backward if there is a loss) for each batch."""
    kept = KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=signals, every=1, **options) as session, session.step(1):
        for batch in batches:
            output = model(batch)
            if loss is not None:
                loss(output).backward()
    return kept


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.relu(x))


def test_a_module_that_is_called_twice_is_one_site_with_two_calls():
    summary = observe(Twice(), torch.ones(8)).summary("activation", "relu", 1)
    assert (summary.total, summary.calls) == (16, 2)


def test_micro_batches_are_weighted_by_their_elements():
    kept = observe(nn.Sequential(nn.Identity()), torch.full((4,), 1.0), torch.full((1,), 6.0))
    assert kept.summary("activation", "0", 1).mean == 2.0
    assert kept.packets[0].facts.num_micro_batches == 2


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Bundle:
    hidden: Tensor
    label: str


class Nested(nn.Module):
    def __init__(self, output) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor):
        return self.output(x)


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (lambda x: x, {"0"}),
        (lambda x: (x, [x, {"deep": x}]), {"0:0", "0:1.0", "0:1.1.deep"}),
        (lambda x: {"logits": x, "cache": None}, {"0:logits"}),
        (lambda x: Pair(x, x), {"0:left", "0:right"}),
        (lambda x: Bundle(x, "text"), {"0:hidden"}),
    ],
)
def test_tensors_in_any_nested_output_are_sites(output, names):
    model = nn.Sequential(Nested(output))
    kept = observe(model, torch.ones(3), signals=("activations",))
    assert kept.rows(1) == {("activation", name) for name in names}


def test_an_output_without_a_tensor_has_a_row_that_says_so():
    model = nn.Sequential(Nested(lambda x: 7))
    presence, reason = observe(model, torch.ones(3), signals=("activations",)).presence("activation", "0", 1)
    assert presence is Presence.UNSUPPORTED
    assert "int" in reason


def test_a_known_site_that_does_not_run_is_absent_not_zero():
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.run_b = nn.Identity(), nn.Identity(), True

        def forward(self, x: Tensor) -> Tensor:
            return self.b(x) if self.run_b else self.a(x)

    model, kept = Sometimes(), KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("activations",), every=1) as session:
        for step in (1, 2):
            with session.step(step):
                model(torch.ones(2))
            model.run_b = False
    assert kept.presence("activation", "b", 2) == (Presence.SITE_ABSENT, "the module did not run in this step")
    assert session.report.observations["activation", Presence.SITE_ABSENT] == 1


def test_a_selected_module_that_never_ran_is_named_in_the_report():
    model = nn.ModuleDict({"used": nn.Identity(), "unused": nn.Identity()})
    with telemetry.watch(model, to=KeepingAggregator(), signals=("activations",), every=1) as session, session.step(1):
        model["used"](torch.ones(1))
    assert session.report.never_ran == ("unused",)


def test_the_gradient_of_an_output_is_the_one_that_autograd_computes():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    hidden = model[0](batch).detach().requires_grad_()
    torch.tanh(hidden).square().sum().backward()
    kept = observe(model, batch, loss=lambda y: y.square().sum())
    assert kept.summary("activation_grad", "0", 1).to_dict() == summarize(hidden.grad).to_dict()


def test_an_output_that_gets_no_gradient_is_absent():
    model = nn.Sequential(nn.Linear(2, 2))
    presence, reason = observe(model, torch.ones(1, 2)).presence("activation_grad", "0", 1)
    assert (presence, reason) == (Presence.SITE_ABSENT, "no gradient reached the output in this step")


def test_an_in_place_relu_changes_neither_training_nor_what_was_observed_before_it():
    def train(watched: bool) -> tuple[Tensor, KeepingAggregator]:
        torch.manual_seed(0)
        model, batch = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(8, 4)
        kept = KeepingAggregator()
        if watched:
            kept = observe(model, batch, loss=lambda y: y.sum())
        else:
            model(batch).sum().backward()
        return model[0].weight.grad, kept

    (plain, _), (observed, kept) = train(False), train(True)
    assert torch.equal(plain, observed)
    assert kept.summary("activation", "0", 1).negative > 0
    assert kept.summary("activation_grad", "0", 1).total == 32


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_block_is_observed_once(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=use_reentrant)

    batch = torch.randn(16, 4, requires_grad=True)
    kept = observe(Checkpointed(), batch, loss=lambda y: y.sum())
    for kind in ("activation", "activation_grad"):
        summary = kept.summary(kind, "block.0", 1)
        assert (summary.total, summary.calls) == (64, 1)


def test_a_complex_output_is_unsupported_and_training_goes_on():
    model = nn.Sequential(Nested(lambda x: torch.complex(x, x)))
    presence, reason = observe(model, torch.ones(3), signals=("activations",)).presence("activation", "0", 1)
    assert presence is Presence.UNSUPPORTED
    assert "stat_dtype_unsupported" in reason


def test_an_error_in_the_reduction_becomes_a_row_not_an_exception(monkeypatch):
    from telemetry.staging import StagingBuffer

    def fail(*_, **__):
        raise RuntimeError("device lost")

    monkeypatch.setattr(StagingBuffer, "observe", fail)
    presence, reason = observe(nn.Sequential(nn.Identity()), torch.ones(3)).presence("activation", "0", 1)
    assert (presence, reason) == (Presence.CAPTURE_FAILED, "RuntimeError: device lost")


def test_a_step_of_nan_only_has_a_row_with_no_finite_element():
    summary = observe(nn.Sequential(nn.Identity()), torch.full((5,), float("nan"))).summary("activation", "0", 1)
    assert (summary.total, summary.finite, summary.nan) == (5, 0, 5)


def test_a_shared_module_is_one_site_with_its_other_names_as_aliases():
    shared = nn.Identity()
    kept = observe(nn.Sequential(shared, shared), torch.ones(3), signals=("activations",))
    assert kept.sites()["activation", "0"].aliases == ("1",)
    assert kept.summary("activation", "0", 1).calls == 2


def test_a_model_without_submodules_is_a_site_under_the_name_of_its_class():
    assert observe(nn.ReLU(), torch.ones(3), signals=("activations",)).rows(1) == {("activation", "ReLU")}
