"""``watch`` takes its settings from outside of the code, says so in the plan, and refuses together with all ranks."""

import os

import pytest
from torch import nn

import telemetry
from aggregator import open_history
from telemetry import errors
from tests.aggregators import KeepingAggregator
from tests.ranks import run_ranks
from tests.watch.jobs import DEADLINES


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_variables_decide_what_is_observed_and_the_plan_says_which(monkeypatch):
    monkeypatch.setenv("RANKFOLD_SIGNALS", "parameters")
    monkeypatch.setenv("RANKFOLD_SELECT", "*weight")
    monkeypatch.setenv("RANKFOLD_EVERY", "3")
    kept = KeepingAggregator()
    with telemetry.watch(net(), to=kept, hist_every=None) as session:
        for step in range(1, 7):
            with session.step(step):
                pass
    assert kept.steps == [1, 3, 6]
    assert kept.rows(3) == {("parameter", "0.weight")}
    lines = str(session.plan).splitlines()
    assert "  signals = parameters (RANKFOLD_SIGNALS)" in lines
    assert "  select = *weight (RANKFOLD_SELECT)" in lines
    assert "  every = 3 (RANKFOLD_EVERY)" in lines
    assert "  hist_every = none (argument)" in lines
    assert not [line for line in lines if "full_updates" in line]
    assert kept.offer.run["settings"]["every"] == {"value": "3", "origin": "RANKFOLD_EVERY"}


def test_the_destination_can_come_from_outside_and_the_record_keeps_the_origins(tmp_path, monkeypatch):
    (tmp_path / "rankfold.toml").write_text('to = "runs/exp1"\nevery = 1\n')
    with telemetry.watch(net(), signals=("parameters",)) as session, session.step(1):
        pass
    run = open_history(tmp_path / "runs" / "exp1").manifest["run"]
    assert run["settings"]["to"] == {"value": "runs/exp1", "origin": "rankfold.toml"}


def test_the_environment_is_read_by_watch_and_at_no_later_time(monkeypatch):
    kept = KeepingAggregator()
    with telemetry.watch(net(), to=kept, signals=("parameters",), every=2) as session:
        monkeypatch.setenv("RANKFOLD_EVERY", "1")
        monkeypatch.setenv("RANKFOLD_DISABLE", "1")
        for step in range(1, 5):
            with session.step(step):
                pass
    assert kept.steps == [1, 2, 4]


def test_a_malformed_variable_is_refused_at_attach_and_the_model_is_free_again(monkeypatch):
    monkeypatch.setenv("RANKFOLD_EVERY", "often")
    model = net()
    with pytest.raises(errors.SettingMalformedError, match="RANKFOLD_EVERY is 'often'"):
        telemetry.watch(model, to=KeepingAggregator())
    monkeypatch.delenv("RANKFOLD_EVERY")
    telemetry.watch(model, to=KeepingAggregator()).close()


def test_a_refusal_says_which_settings_the_code_does_not_show(monkeypatch):
    monkeypatch.setenv("RANKFOLD_SELECT", "nothing.*")
    with pytest.raises(errors.NothingSelectedError, match="set outside of the code: select from RANKFOLD_SELECT"):
        telemetry.watch(net(), to=KeepingAggregator())


def test_no_destination_is_refused():
    with pytest.raises(errors.ConfigurationError, match="no destination was given"):
        telemetry.watch(net())


def attach_with(rank, world_size, to, variables):
    os.environ.update(variables.get(rank, {}))
    try:
        telemetry.watch(net(), to=to, deadlines=DEADLINES).close()
    except errors.RankfoldError as error:
        return error
    return None


def test_a_malformed_variable_on_one_rank_is_refused_on_all(tmp_path):
    found = run_ranks(attach_with, 2, tmp_path / "run", {1: {"RANKFOLD_HIST_EVERY": "x"}})
    assert [type(error) for error in found] == [errors.SettingMalformedError] * 2
    assert {error.rank for error in found} == {1}
    assert all("RANKFOLD_HIST_EVERY" in str(error) for error in found)
    assert not (tmp_path / "run").exists()


def test_a_cadence_that_differs_between_ranks_is_refused_before_any_step(tmp_path):
    found = run_ranks(attach_with, 2, tmp_path / "run", {1: {"RANKFOLD_EVERY": "7"}})
    assert [type(error) for error in found] == [errors.ConfigurationError] * 2
    assert all("the ranks differ in cadence" in str(error) for error in found)
    assert not (tmp_path / "run").exists()
