"""RANKFOLD_DISABLE on any rank: nothing is observed, nothing is refused, and the record says who turned it off."""

import os

import pytest
import torch
from torch import nn

import telemetry
from aggregator import open_history
from aggregator.sinks import MemorySink
from telemetry.protocol import AttachOffer
from tests.aggregators import KeepingAggregator
from tests.ranks import run_ranks
from tests.watch.jobs import DEADLINES, STEPS, train


@pytest.fixture
def disabled(monkeypatch):
    monkeypatch.setenv("RANKFOLD_DISABLE", "1")


def hooks(model):
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


def test_steps_go_on_without_a_hook_a_packet_or_a_sink(disabled):
    model, kept, sink = nn.Sequential(nn.Linear(2, 2)), KeepingAggregator(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with telemetry.watch(model, to=kept, optimizer=optimizer, every=1, sinks=[sink]) as session:
        for step in (1, 2):
            with session.step(step):
                assert hooks(model) == 0
                assert not optimizer._optimizer_step_pre_hooks
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    assert kept.packets == []
    assert sink.run is None
    assert (session.report.num_steps, session.report.num_logged) == (2, 0)
    assert "DISABLED: RANKFOLD_DISABLE is set on rank 0" in str(session.plan)


def test_what_would_be_refused_is_not_looked_at(disabled, monkeypatch):
    monkeypatch.setenv("RANKFOLD_EVERY", "often")
    kept = KeepingAggregator()
    layout = telemetry.ParallelLayout.from_sizes({"dp": 64})
    telemetry.watch(nn.Linear(2, 2), to=kept, signals=("loss",), optimizer="adam", layout=layout).close()
    assert isinstance(kept.offer, AttachOffer)
    assert (kept.offer.failure, kept.offer.sites) == (None, ())


def test_the_model_is_free_for_another_session(disabled, monkeypatch):
    model = nn.Linear(2, 2)
    with telemetry.watch(model, to=KeepingAggregator()):
        monkeypatch.delenv("RANKFOLD_DISABLE")
        telemetry.watch(model, to=KeepingAggregator()).close()


@pytest.mark.parametrize("destination", ["a directory with other files", "an unknown scheme", "none at all"])
def test_where_no_record_can_be_written_training_still_goes_on(destination, disabled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    to = {"a directory with other files": {"to": tmp_path}, "an unknown scheme": {"to": "pigeon://coop"}}
    with telemetry.watch(nn.Linear(2, 2), **to.get(destination, {})) as session, session.step(1):
        pass
    assert session.plan.unrecorded
    assert "nothing is recorded" in str(session.plan)
    assert session.report.merge.failure is None
    assert os.listdir(tmp_path) == ["thesis.txt"]


def train_with(rank, world_size, to, switched_off, by_rank):
    if rank in switched_off:
        os.environ["RANKFOLD_DISABLE"] = "1"
    plain = train(rank, world_size, None, random=True)
    watched = train(rank, world_size, to, random=True, **by_rank.get(rank, {}))
    return plain["losses"], watched["losses"], watched["report"]


@pytest.mark.parametrize(
    ("switched_off", "by_rank"),
    [
        ((0, 1), {}),
        ((1,), {}),
        # What the other rank would refuse for no longer matters, whichever of them it is.
        ((1,), {0: {"signals": ("loss",)}}),
        ((0,), {1: {"every": 7}}),
    ],
)
def test_one_rank_is_enough_to_turn_it_off_on_all_and_the_record_names_it(switched_off, by_rank, tmp_path):
    for plain, watched, report in run_ranks(train_with, 2, tmp_path / "run", switched_off, by_rank):
        assert plain == watched
        assert (report.num_steps, report.num_logged, report.merge.failure) == (STEPS, 0, None)
    history = open_history(tmp_path / "run")
    assert history.steps().num_rows == 0
    assert history.manifest["run"]["disabled_by"] == list(switched_off)
    assert history.segments()["sealed"].to_pylist() == [True]


def test_a_run_that_was_not_turned_off_does_not_speak_of_it(tmp_path):
    with telemetry.watch(nn.Linear(2, 2), to=tmp_path / "run", deadlines=DEADLINES) as session:
        pass
    assert session.plan.disabled_by == ()
    assert "disabled_by" not in open_history(tmp_path / "run").manifest["run"]
