"""A stand-in for Megatron's training loop: its shapes, its order of calls, its own tensor observation."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from telemetry.errors import ConfigurationError
from telemetry.integrations import megatron
from telemetry.presence import Presence
from tests.aggregators import GatheringAggregator, KeepingAggregator
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (["gradients"], "not NAME:INTERVAL"),
        ([":5"], "not NAME:INTERVAL"),
        (["loss:5"], "names 'loss'; there are activations"),
        (["updates:5"], "names 'updates'"),
        (["gradients:5", "gradients:10"], "'gradients' has two specs"),
        (["gradients:0"], "interval of 'gradients' is '0'"),
        (["gradients:-1"], "interval of 'gradients' is '-1'"),
        (["gradients:often"], "interval of 'gradients' is 'often'"),
        (["gradients:1.5"], "interval of 'gradients' is '1.5'"),
        (["gradients:"], "interval of 'gradients' is ''"),
    ],
)
def test_a_spec_that_is_malformed_unknown_double_or_not_positive_is_refused(specs, says):
    with pytest.raises(ConfigurationError, match=says):
        megatron.build(specs, to="runs/none")


def test_no_specs_make_no_observer_and_options_that_specs_decide_are_refused():
    assert megatron.build([], to="runs/none") is None
    with pytest.raises(ConfigurationError, match="decide every, layout"):
        megatron.build(["gradients:5"], to="runs/none", layout=None, every=3)


def core_with(number_of_arguments: int) -> ModuleType:
    """Return a module with Megatron's functions, whose observers get five arguments in older versions."""
    module = ModuleType("megatron.core.tensor_observation")
    active: ContextVar = ContextVar("active", default=None)

    @contextmanager
    def capture(observer, source_kinds):
        token = active.set((observer, source_kinds))
        try:
            yield
        finally:
            active.reset(token)

    def observe(owner, name, source_kind, tensor, *, tp_shard_dim=None, sequence_dim=None, batch_dim=None):
        if (scope := active.get()) is not None and source_kind in scope[1]:
            arguments = (owner, name, source_kind, tensor, tp_shard_dim, sequence_dim, batch_dim)
            scope[0](*arguments[:number_of_arguments])

    module.capture_tensor_observations, module.observe_tensor = capture, observe
    return module


@pytest.fixture(params=[5, 7], ids=["five arguments", "seven arguments"])
def core(request, monkeypatch) -> ModuleType:
    module = core_with(request.param)
    parent = ModuleType("megatron.core")
    parent.tensor_observation = module
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", parent)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_observation", module)
    return module


class TransformerLayer(nn.Module):
    def __init__(self, layer_number: int, observe) -> None:
        super().__init__()
        self.layer_number, self.observe = layer_number, observe
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden)
        self.observe(self, "router_logits", "router_logits", logits, tp_shard_dim=0, sequence_dim=0, batch_dim=1)
        return hidden + logits


class GPTModel(nn.Module):
    def __init__(self, first: int, observe) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(
            [TransformerLayer(first + 1, observe), TransformerLayer(first + 2, observe)]
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        return hidden


def group(size: int = 1, rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def groups(**given) -> SimpleNamespace:
    return SimpleNamespace(**{"tp": group(), "cp": group(), "dp_cp": group(), "pp": group(), "ep": group(), **given})


class MegatronOptimizer:
    """Not a torch optimizer; it steps on the gradients that are in ``main_grad``."""

    def __init__(self, model) -> None:
        self.parameters = list(model.parameters())

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= 0.1 * parameter.main_grad
                parameter.main_grad.zero_()


def accumulate(parameters) -> None:
    for parameter in parameters:
        if not hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float64)
        parameter.main_grad += parameter.grad
        parameter.grad = None


def train_step(model, optimizer, observer, iteration: int, pg_collection, *, reruns: int = 1) -> None:
    """Call in the order of Megatron's ``train_step``: forward-backward, perhaps again, the observer, the optimizer."""
    known = {"model": [model], "iteration": iteration, "pg_collection": pg_collection}
    for _ in range(reruns):
        for parameter in optimizer.parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float64)
        with observer.observe_forward_backward(**known):
            for _ in range(2):
                model(torch.ones(3, 2, 4)).sum().backward()
                accumulate(optimizer.parameters)
    observer(optimizer=optimizer, **known)
    optimizer.step()


def test_an_interval_of_two_is_due_first_in_the_second_iteration_and_recorded_as_step_two(core):
    model, kept = GPTModel(0, core.observe_tensor), KeepingAggregator()
    optimizer = MegatronOptimizer(model)
    observer = megatron.build(["router_logits:2", "gradients:4", "parameters:4"], to=kept)
    for iteration in range(5):
        train_step(model, optimizer, observer, iteration, groups())
    report = observer.close()
    assert kept.steps == [2, 4]
    name = "decoder.layers.0.router_logits"
    assert kept.summary("router_logits", name, 2).calls == 2
    assert {kind for kind, _ in kept.rows(2)} == {"router_logits"}
    assert {kind for kind, _ in kept.rows(4)} == {"router_logits", "gradient", "parameter"}
    assert kept.summary("gradient", "decoder.layers.1.linear.bias", 4).mean == 12.0
    assert kept.sites()["router_logits", name].placements[-1] == ("tp", "shard(0)")
    assert report.num_steps == 5


def test_when_a_step_is_due_depends_on_the_global_iteration_alone(core):
    model, kept = GPTModel(0, core.observe_tensor), KeepingAggregator()
    observer = megatron.build(["router_logits:200"], to=kept)
    for iteration in (550, 599, 600):
        train_step(model, MegatronOptimizer(model), observer, iteration, groups())
    observer.close()
    assert kept.steps == [600]


def test_a_rerun_of_an_iteration_replaces_what_the_first_run_has_shown(core):
    model, kept = GPTModel(0, core.observe_tensor), KeepingAggregator()
    observer = megatron.build(["router_logits:1", "gradients:1"], to=kept)
    train_step(model, MegatronOptimizer(model), observer, 0, groups(), reruns=3)
    observer.close()
    assert kept.summary("router_logits", "decoder.layers.0.router_logits", 1).calls == 2
    assert kept.summary("gradient", "decoder.layers.1.linear.bias", 1).mean == 12.0


def test_an_iteration_that_raises_or_is_skipped_is_not_recorded_and_the_next_one_is(core):
    model, kept = GPTModel(0, core.observe_tensor), KeepingAggregator()
    observer = megatron.build(["router_logits:1"], to=kept)
    with pytest.raises(KeyError), observer.observe_forward_backward(model=[model], iteration=0, pg_collection=groups()):
        model(torch.ones(3, 2, 4))
        raise KeyError
    with pytest.raises(ConfigurationError, match="iteration 0 was not observed"):
        observer(model=[model], optimizer=None, iteration=0, pg_collection=groups())
    with observer.observe_forward_backward(model=[model], iteration=1, pg_collection=groups()):
        model(torch.ones(3, 2, 4))
    train_step(model, MegatronOptimizer(model), observer, 2, groups())
    observer.close()
    assert kept.steps == [3]
    assert kept.summary("router_logits", "decoder.layers.0.router_logits", 3).calls == 2


def test_without_megatron_our_own_call_sites_reach_the_session():
    from telemetry import observe_tensor

    model, kept = GPTModel(0, observe_tensor), KeepingAggregator()
    observer = megatron.build(["router_logits:1", "mtp_logits:1"], to=kept)
    train_step(model, MegatronOptimizer(model), observer, 0, groups())
    assert observer.close().never_met == ("mtp_logits",)
    presence = kept.presence("router_logits", "decoder.layers.0.router_logits", 1)
    assert presence == (Presence.OBSERVED, "")


def pipeline_of_two_tensor_parallel_stages(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Return calls and elements by name: two stages of two layers, the sequence split over two tensor ranks."""
    from telemetry import observe_tensor

    stage, tensor_rank = divmod(rank, 2)
    model, kept = GPTModel(2 * stage, observe_tensor), GatheringAggregator()
    observer = megatron.build(["router_logits:1"], to=kept)
    pg_collection = groups(tp=group(2, tensor_rank), pp=group(2, stage))
    train_step(model, MegatronOptimizer(model), observer, 0, pg_collection)
    observer.close()
    found = {name: kept.summary(kind, name, 1) for kind, name in kept.rows(1)}
    return {name: (summary.calls, summary.total) for name, summary in found.items()}


def test_the_process_groups_are_the_layout_and_layers_have_model_wide_names():
    (found, *others) = run_ranks(pipeline_of_two_tensor_parallel_stages, 4)
    names = [f"decoder.layers.{layer}.router_logits" for layer in range(4)]
    assert found == dict.fromkeys(names, (4, 2 * 2 * 24))
    assert others == [found] * 3
