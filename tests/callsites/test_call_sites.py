"""A session listens to call sites: names, placements, cadence, folding, and what it does about bad calls."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import telemetry
from telemetry import ParallelLayout, capture_tensor_observations, observe_tensor
from telemetry.errors import ConfigurationError, SignalUnknownError
from telemetry.presence import Presence
from telemetry.scopes import GATE
from telemetry.summary import summarize
from tests.aggregators import KeepingAggregator


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        observe_tensor(self, "logits", "router_logits", y, sequence_dim=0, batch_dim=1)
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        observe_tensor(self, "output", "output_logits", x)
        return x


def watch(model: nn.Module, kept: KeepingAggregator, **options) -> telemetry.Session:
    given = {"signals": (), "call_sites": ("router_logits",), "every": 1, "hist_every": None}
    return telemetry.watch(model, to=kept, **{**given, **options})


def observed_once(**call) -> tuple[KeepingAggregator, str]:
    """Show one tensor to a session and return what it kept and the name of the only site."""
    model, kept = Net(), KeepingAggregator()
    options = call.pop("options", {})
    with watch(model, kept, **options) as session, session.step(1):
        call.setdefault("owner", model.layers[0])
        call.setdefault("tensor", torch.ones(2, 3))
        observe_tensor(call.pop("owner"), "logits", "router_logits", call.pop("tensor"), **call)
    ((_, name),) = kept.rows(1)
    return kept, name


def test_a_due_step_observes_the_calls_of_its_kinds_under_the_path_of_their_owner():
    torch.manual_seed(0)
    model, kept, x = Net(), KeepingAggregator(), torch.randn(3, 2, 4)
    with watch(model, kept, call_sites=("router_logits", "output_logits")) as session, session.step(1):
        y = model(x)
    assert kept.rows(1) == {
        ("router_logits", "layers.0.logits"),
        ("router_logits", "layers.1.logits"),
        ("output_logits", "output"),
    }
    assert kept.summary("output_logits", "output", 1).to_dict() == summarize(y).to_dict()


def test_kinds_nobody_asked_for_are_not_observed():
    model, kept = Net(), KeepingAggregator()
    with watch(model, kept) as session, session.step(1):
        model(torch.ones(1, 1, 4))
    assert {kind for kind, _ in kept.rows(1)} == {"router_logits"}


def test_each_kind_has_its_own_cadence_beside_that_of_the_signals():
    model, kept = Net(), KeepingAggregator()
    every = {"activations": 3, "router_logits": 2, "output_logits": 4}
    options = {"signals": ("activations",), "call_sites": ("router_logits", "output_logits"), "every": every}
    with watch(model, kept, **options) as session:
        for step in range(1, 9):
            with session.step(step):
                model(torch.ones(1, 1, 4))
    kinds = {step: {kind for kind, _ in kept.rows(step)} for step in kept.steps}
    assert kinds == {
        1: {"activation", "router_logits", "output_logits"},
        2: {"router_logits"},
        3: {"activation"},
        4: {"router_logits", "output_logits"},
        6: {"activation", "router_logits"},
        8: {"router_logits", "output_logits"},
    }


def test_without_the_first_step_an_interval_of_two_is_due_first_at_step_two():
    model, kept = Net(), KeepingAggregator()
    with watch(model, kept, every=2, first_step=False) as session:
        for step in range(1, 5):
            with session.step(step):
                model(torch.ones(1, 1, 4))
    assert kept.steps == [2, 4]


def test_a_call_site_that_does_not_run_is_absent():
    model, kept = Net(), KeepingAggregator()
    with watch(model, kept) as session:
        with session.step(1):
            model(torch.ones(1, 1, 4))
        with session.step(2):
            model.layers[0](torch.ones(1, 1, 4))
    reason = "the call site did not run in this step"
    assert kept.presence("router_logits", "layers.1.logits", 2) == (Presence.SITE_ABSENT, reason)


def test_a_kind_that_no_logged_step_met_is_named_in_the_report():
    model = Net()
    with watch(model, KeepingAggregator(), call_sites=("router_logits", "mtp_logits")) as session, session.step(1):
        model(torch.ones(1, 1, 4))
    assert session.report.never_met == ("mtp_logits",)
    assert "no logged step met a call site of the kinds mtp_logits" in str(session.report)


def test_micro_batches_and_thousands_of_calls_fold_into_one_row_and_keep_no_tensor():
    model, kept = Net(), KeepingAggregator()
    owner = model.layers[0]
    with watch(model, kept) as session, session.step(1):
        tensor = torch.ones(4)
        reference = weakref.ref(tensor)
        observe_tensor(owner, "logits", "router_logits", tensor)
        del tensor
        assert reference() is None
        gc.collect()
        before = sum(isinstance(o, Tensor) for o in gc.get_objects())
        for valid in range(2000):
            observe_tensor(owner, "logits", "router_logits", torch.full((valid % 5, 4), 2.0))
        gc.collect()
        assert sum(isinstance(o, Tensor) for o in gc.get_objects()) <= before + 2
    summary = kept.summary("router_logits", "layers.0.logits", 1)
    assert (summary.calls, summary.total, summary.sum) == (2001, 4 + 400 * 10 * 4, 4 + 2 * 400 * 10 * 4)


LAYOUT = ParallelLayout.from_sizes({"pp": 1, "dp": 1, "cp": 1, "tp": 1})


@pytest.mark.parametrize(
    ("dims", "placements"),
    [
        ({}, {"tp": "replica", "cp": "shard", "dp": "shard", "pp": "shard"}),
        (
            {"tp_shard_dim": -1, "sequence_dim": 0, "batch_dim": 1},
            {"tp": "shard(1)", "cp": "shard(0)", "dp": "shard(1)", "pp": "shard"},
        ),
        ({"tp_shard_dim": 0, "sequence_dim": 0}, {"tp": "shard(0)", "cp": "shard(0)", "dp": "shard", "pp": "shard"}),
    ],
)
def test_the_dims_of_a_call_become_placements_and_sequence_and_batch_are_always_populations(dims, placements):
    kept, name = observed_once(options={"layout": LAYOUT}, **dims)
    assert dict(kept.sites()["router_logits", name].placements) == placements


def test_a_dim_that_the_tensor_lacks_makes_the_site_unsupported_not_the_step_fail():
    kept, name = observed_once(options={"layout": LAYOUT}, tp_shard_dim=2)
    presence, reason = kept.presence("router_logits", name, 1)
    assert presence is Presence.UNSUPPORTED
    assert "tp_shard_dim is 2, the tensor has 2 dims" in reason


def test_an_unknown_owner_is_recorded_under_its_class_with_a_reason():
    class Router:
        pass

    kept, name = observed_once(owner=Router())
    assert name == "unresolved.Router.logits"
    presence, reason = kept.presence("router_logits", name, 1)
    assert presence is Presence.OBSERVED
    assert "no module of the watched model" in reason


def test_the_wrapper_of_a_module_is_the_module():
    kept, name = observed_once(owner=nn.DataParallel(Net()))
    assert name == "unresolved.DataParallel.logits"
    model, kept = Net(), KeepingAggregator()
    wrapper = nn.DataParallel(model.layers[1])
    with watch(model, kept) as session, session.step(1):
        observe_tensor(wrapper, "logits", "router_logits", torch.ones(1))
        observe_tensor(model.layers, "list", "router_logits", torch.ones(1))
    assert {n for _, n in kept.rows(1)} == {"layers.1.logits", "layers.list"}


def test_names_are_those_of_the_whole_model_under_pipeline_parallelism():
    model, kept = Net(), KeepingAggregator()
    for index, layer in enumerate(model.layers):
        layer.layer_number = index + 3
    with watch(model, kept) as session, session.step(1):
        model(torch.ones(1, 1, 4))
    site = kept.sites()["router_logits", "layers.2.logits"]
    assert site.aliases == ("layers.0.logits",)


def test_what_is_no_tensor_is_unsupported():
    kept, name = observed_once(tensor=[1.0, 2.0])
    assert kept.presence("router_logits", name, 1)[0] is Presence.UNSUPPORTED


def test_a_call_of_a_kind_of_a_signal_does_not_run_into_the_sites_of_that_signal():
    model, kept = Net(), KeepingAggregator()
    with (
        telemetry.watch(model, to=kept, signals=("activations",), every=1) as session,
        session.step(1),
        capture_tensor_observations(session.observer, {"activation"}),
    ):
        model(torch.ones(1, 1, 4))
        observe_tensor(model.layers[0], "linear", "activation", torch.ones(7))
    assert kept.summary("activation", "layers.0.linear", 1).total == 4
    assert kept.summary("activation", "layers.0.linear:call", 1).total == 7


@pytest.mark.parametrize("kinds", [("activation",), ("gradients",), ("call_sites",), ("",), (3,)])
def test_reserved_and_empty_kinds_are_refused(kinds):
    with pytest.raises(ConfigurationError, match="call_sites names"):
        watch(Net(), KeepingAggregator(), call_sites=kinds)


def test_a_cadence_for_a_kind_that_is_not_watched_is_refused_with_the_known_ones():
    with pytest.raises(SignalUnknownError, match=r"'mtp_logits'.*router_logits"):
        watch(Net(), KeepingAggregator(), every={"mtp_logits": 3})


@pytest.mark.parametrize("number_of_arguments", [5, 7])
def test_the_observer_of_a_session_serves_foreign_scopes_of_five_and_seven_arguments(number_of_arguments):
    model, kept = Net(), KeepingAggregator()
    arguments = (model.layers[0], "logits", "router_logits", torch.ones(3), None, 0, 0)[:number_of_arguments]
    with watch(model, kept, call_sites=(), every=2, first_step=False) as session:
        for step in (1, 2):
            with session.step(step):
                session.observer(*arguments)
        session.observer(*arguments)
    assert kept.steps == [2]
    assert kept.summary("router_logits", "layers.0.logits", 2).calls == 1


def test_an_explicit_scope_keeps_its_calls_from_the_session_inside_and_outside_of_the_step():
    model, kept, seen = Net(), KeepingAggregator(), []

    def observer(*call) -> None:
        seen.append(call[1])

    with watch(model, kept) as session:
        with session.step(1), capture_tensor_observations(observer, {"router_logits"}):
            model.layers[0](torch.ones(1, 1, 4))
        with capture_tensor_observations(observer, {"router_logits"}), session.step(2):
            model.layers[0](torch.ones(1, 1, 4))
        with session.step(3):
            model.layers[0](torch.ones(1, 1, 4))
    assert seen == ["logits", "logits"]
    assert kept.rows(1) == set()
    assert kept.summary("router_logits", "layers.0.logits", 3).calls == 1


def test_two_sessions_of_one_model_both_hear_and_leave_in_any_order():
    model, first, second = Net(), KeepingAggregator(), KeepingAggregator()
    a, b = watch(model, first, name="a"), watch(model, second, name="b")
    scopes = a.step(1), b.step(1)
    for scope in scopes:
        scope.__enter__()
    model(torch.ones(1, 1, 4))
    for scope in scopes:
        scope.__exit__(None, None, None)
    model(torch.ones(1, 1, 4))
    for kept in (first, second):
        assert kept.summary("router_logits", "layers.0.logits", 1).calls == 1
    a.close()
    b.close()
    assert GATE.kinds == frozenset()


class Stop(Exception):
    pass


def test_a_step_that_raises_leaves_no_scope_behind():
    model, kept = Net(), KeepingAggregator()
    with watch(model, kept) as session:
        with pytest.raises(Stop), session.step(1):
            model(torch.ones(1, 1, 4))
            raise Stop
        assert GATE.kinds == frozenset()
        with session.step(1):
            model(torch.ones(1, 1, 4))
    assert kept.summary("router_logits", "layers.0.logits", 1).calls == 1


def test_the_residuals_of_a_sequence_parallel_layer_are_shards_of_tp():
    model, kept = Net(), KeepingAggregator()
    layer = model.layers[0]
    layer.config = SimpleNamespace(sequence_parallel=True)
    kinds = ("residual_accumulator", "residual_contribution")
    with watch(model, kept, call_sites=kinds, layout=LAYOUT) as session, session.step(1):
        x = torch.ones(3, 2, 4)
        telemetry.observe_layer_residuals(layer, x, x + 2)
    assert kept.summary(kinds[1], "layers.0.residual_contribution", 1).mean == 2.0
    assert dict(kept.sites()[kinds[0], "layers.0.residual_accumulator"].placements)["tp"] == "shard(0)"


def test_the_plan_shows_the_kinds_of_call_sites():
    session = watch(Net(), KeepingAggregator(), every={"router_logits": 7})
    assert "router_logits" in str(session.plan)
    assert session.plan.signals[0].every == 7
    session.close()
