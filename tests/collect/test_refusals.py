"""Bad input is refused at attach with a code, what came and what to do."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from torch import nn

import telemetry
from telemetry import errors
from tests.aggregators import KeepingAggregator


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"signals": ("activations", "loss")}, errors.SignalUnknownError, "'loss'"),
        ({"every": {"weights": 3}}, errors.SignalUnknownError, "'weights'"),
        ({"every": 0}, errors.ConfigurationError, "0"),
        ({"every": 2.5}, errors.ConfigurationError, "2.5"),
        ({"hist_every": -1}, errors.ConfigurationError, "-1"),
        ({"due_offset": 0.5}, errors.ConfigurationError, "0.5"),
        ({"select": "layers.*"}, errors.NothingSelectedError, "1 Linear (such as '0')"),
        ({"select": 3}, errors.ConfigurationError, "3"),
        ({"select": lambda name, module: module.missing}, errors.ConfigurationError, "missing"),
        (
            {"layout": telemetry.ParallelLayout.from_sizes({"dp": 2, "tp": 2})},
            errors.LayoutMismatchError,
            "4 ranks (dp 2 × tp 2), the job has 1",
        ),
        ({"optimizer": "adam"}, errors.ConfigurationError, "str"),
    ],
)
def test_a_bad_argument_is_refused_by_name(options, error, says):
    kept = KeepingAggregator()
    with pytest.raises(error, match=re.escape(says)):
        telemetry.watch(net(), to=kept, **options)


def test_a_refused_model_is_not_left_marked_as_watched():
    model = net()
    with pytest.raises(errors.ConfigurationError):
        telemetry.watch(model, to=KeepingAggregator(), every=0)
    telemetry.watch(model, to=KeepingAggregator()).close()


def test_a_model_is_watched_once_under_each_name():
    model = net()
    with telemetry.watch(model, to=KeepingAggregator()):
        with pytest.raises(errors.ModelAlreadyWatchedError, match="'default'"):
            telemetry.watch(model, to=KeepingAggregator())
        telemetry.watch(model, to=KeepingAggregator(), name="second").close()


@pytest.mark.parametrize("second", [3, 2])
def test_a_step_that_repeats_or_goes_back_is_refused(second):
    with telemetry.watch(net(), to=KeepingAggregator()) as session:
        with session.step(3):
            pass
        with pytest.raises(errors.StepOrderError, match=f"step {second} came after step 3"):
            session.step(second)


def test_nested_scopes_and_steps_after_close_are_refused():
    session = telemetry.watch(net(), to=KeepingAggregator())
    with session.step(1), pytest.raises(errors.SessionNestingError):
        session.step(2)
    with pytest.raises(errors.SessionClosedError):
        _ = session.report
    session.close()
    with pytest.raises(errors.SessionClosedError):
        session.step(2)


def test_an_unknown_destination_names_the_known_ones():
    with pytest.raises(errors.AggregatorUnavailableError, match="collective"):
        telemetry.watch(net(), to="carrier-pigeon://coop")


def test_several_announced_ranks_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(errors.ProcessGroupMissingError, match="WORLD_SIZE is 4"):
        telemetry.watch(net(), to=KeepingAggregator())


def test_a_name_that_trackers_would_refuse_is_made_safe():
    model = nn.ModuleDict({"a b/c": nn.Identity()})
    kept = KeepingAggregator()
    with telemetry.watch(model, to=kept, signals=("activations",), every=1) as session, session.step(1):
        model["a b/c"](torch.ones(1))
    assert kept.rows(1) == {("activation", "a_b_c")}


def test_every_error_has_a_code_of_its_own_pickles_and_crosses_the_wire():
    classes = [getattr(errors, name) for name in errors.__all__]
    assert len({cls.code for cls in classes}) == len(classes)
    for cls in classes:
        error = cls("what", remedy="do this", rank=3, step=7, site="layers.0", failures={1: "a", 3: "b"})
        for copy in (pickle.loads(pickle.dumps(error)), errors.RankfoldError.from_wire(error.to_wire())):
            assert type(copy) is cls
            assert vars(copy) == vars(error)
            assert str(copy) == str(error)
    assert "[rankfold_error] what (rank 3, step 7, site layers.0)" in str(
        errors.RankfoldError("what", rank=3, step=7, site="layers.0")
    )
