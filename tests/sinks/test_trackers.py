"""What a tracker's own files say is what the history says: every value, every step, every count; from one rank."""

import math
import os
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from aggregator import open_history
from aggregator.sinks import MetricLoggerSink, RunInfo, RunPlan, TensorBoardSink, WandbSink, admit_sinks
from aggregator.testing import make_packet, make_site, make_step, make_steps
from telemetry.errors import ConfigurationError, FieldUnknownError, SinkCapabilityError, SinkUnavailableError
from telemetry.summary import DEFAULT_DESCRIPTOR, FLOAT_FIELDS, INT_FIELDS, Histogram, summarize
from tests.ranks import run_ranks
from tests.sinks.trackers import FIELDS, TRACKERS, wandb_files, wandb_records, wandb_rows
from tests.watch.jobs import STEPS, train

STORED = tuple(field for field in FIELDS if field in (*INT_FIELDS, *FLOAT_FIELDS))
DERIVED = ("std", "rms", "l2", "zero_fraction")
SITE = make_site("layers.0:q_proj")


def run_info(segment=0, resume_step=None):
    return RunInfo("0123456789abcdef", segment, resume_step, 1, DEFAULT_DESCRIPTOR, {"model": "tiny", "lr": math.nan})


def deliver(sink, steps, run=None):
    admit_sinks([sink], RunPlan((), DEFAULT_DESCRIPTOR))
    sink.open(run or run_info())
    for step in steps:
        sink.emit(step)
    sink.flush()
    sink.close()


def steps(first, last, **packet):
    summary = summarize(torch.tensor([1.0, -3.0, 0.0]), histogram=True)
    return make_steps(make_packet(step, {SITE: summary}, **packet) for step in range(first, last + 1))


def train_into(rank, world_size, folder, tracker, environment):
    """Train watched; each rank's sink has a folder of its own, so that whoever writes is seen."""
    os.environ.update(environment)
    sink = TRACKERS[tracker].make(folder / f"rank{rank}", fields=FIELDS)
    return train(rank, world_size, folder / "run", sinks=[sink])["report"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tracker", TRACKERS)
def test_two_ranks_make_one_run_whose_values_are_those_of_the_history(tracker, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name.startswith(("WANDB", "MLFLOW", "COMET"))}
    (tmp_path / "rank0").mkdir()
    reports = run_ranks(train_into, 2, tmp_path, tracker, environment)
    of, folder, history = TRACKERS[tracker], tmp_path / "rank0", open_history(tmp_path / "run")
    assert not (tmp_path / "rank1").exists()
    assert of.num_runs(folder) == 1
    (account,) = reports[0].merge.sinks
    rows = history.observations().to_pylist()
    assert (account.state, account.num_emitted, account.disclosures) == ("ok", STEPS, ())
    assert account.observations == {"observed": len(rows)}

    def as_shown(value):
        return float(np.float32(value)) if of.holds_float32 else value

    expected, counted = defaultdict(dict), defaultdict(dict)
    for row in rows:
        name = f"{row['kind']}/{row['site']}"
        for field in STORED:
            if row[field] is not None and not math.isnan(row[field]):
                expected[f"{name}/{field}"][row["step"]] = as_shown(row[field])
        if row["hist_bins"] is not None:
            counts = np.zeros(DEFAULT_DESCRIPTOR.num_counts, np.int64)
            counts[row["hist_bins"]] = row["hist_counts"]
            counted[name][row["step"]] = of.shown(Histogram(DEFAULT_DESCRIPTOR, counts))
    for site in ("embed.weight", "body.0.weight"):
        for field in DERIVED:
            series = history.series(site, "gradient", field).to_pydict()
            values = map(as_shown, series["value"])
            expected[f"gradient/{site}/{field}"] = dict(zip(series["step"], values, strict=True))
    shown = of.scalars(folder)
    assert {tag: shown.get(tag) for tag in expected} == expected
    assert shown["rankfold/ranks_merged"] == dict.fromkeys(range(1, STEPS + 1), 2)
    if tracker == "metric_logger":
        counted = {}
    assert of.histograms(folder) == counted
    assert {f"{name}/{field}" for name in counted for field in ("min", "max", "std", "l2", "nonfinite")} <= set(shown)


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "comet"])
def test_a_replay_loses_no_step_and_is_disclosed(tracker, tmp_path):
    of = TRACKERS[tracker]
    deliver(of.make(tmp_path), steps(1, 150))
    resumed = of.make(tmp_path)
    deliver(resumed, steps(101, 160, segment=1), run_info(1, resume_step=101))
    assert of.steps(tmp_path) == list(range(1, 161))
    segments = of.scalars(tmp_path)["rankfold/segment"]
    assert [segments[step] for step in (100, 101, 160)] == [0, 1, 1]
    (told,) = resumed.disclosures
    assert told.startswith("points from step 101 on that an earlier attempt wrote cannot be taken back here")


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "comet", "metric_logger"])
def test_a_segment_that_begins_in_the_same_process_is_disclosed_by_its_earliest_step(tracker, tmp_path):
    sink = TRACKERS[tracker].make(tmp_path)
    sink.open(run_info())
    for segment, (first, last) in enumerate([(1, 5), (3, 6), (4, 7)]):
        if segment:
            sink.begin_segment(run_info(segment, resume_step=first))
        for step in steps(first, last, segment=segment):
            sink.emit(step)
    sink.close()
    segments = TRACKERS[tracker].scalars(tmp_path)["rankfold/segment"]
    assert segments == {1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2}
    assert sink.disclosures[0].startswith("points from step 3 on that an earlier attempt wrote cannot be taken back")


@pytest.mark.parametrize("tracker", TRACKERS)
def test_histograms_can_be_left_out(tracker, tmp_path):
    deliver(TRACKERS[tracker].make(tmp_path, histograms=False), steps(1, 1))
    assert TRACKERS[tracker].histograms(tmp_path) == {}
    assert TRACKERS[tracker].scalars(tmp_path)["activation/layers.0:q_proj/min"] == {1: -3.0}


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow", "comet", "metric_logger"])
def test_an_unknown_field_is_refused_when_the_sink_is_made(tracker, tmp_path):
    with pytest.raises(FieldUnknownError, match="rmss"):
        TRACKERS[tracker].make(tmp_path, fields=("rmss",))


@pytest.mark.parametrize(("module", "tracker"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("comet_ml", "comet")])
def test_a_tracker_that_is_not_installed_is_refused_with_the_command(module, tracker, tmp_path, monkeypatch):
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else find(name))
    with pytest.raises(SinkUnavailableError, match=rf"pip install 'rankfold\[{tracker}\]'"):
        TRACKERS[tracker].make(tmp_path)


class TestWandb:
    def test_the_axis_is_the_step_and_a_kind_that_comes_late_has_it_as_well(self, tmp_path):
        late = {SITE: summarize(torch.ones(1)), make_site("w", "router_logits"): summarize(torch.ones(1))}
        packets = [make_packet(1, {SITE: summarize(torch.ones(1))}), make_packet(2, late)]
        deliver(TRACKERS["wandb"].make(tmp_path), make_steps(packets))
        metrics = [record.metric for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "metric"]
        axes = {metric.glob_name: metric.step_metric for metric in metrics if metric.glob_name}
        assert axes == dict.fromkeys(["rankfold/*", "activation/*", "router_logits/*"], "rankfold/step")

    def test_a_wide_histogram_is_coarsened_with_its_total_and_that_is_disclosed(self, tmp_path):
        octaves = torch.exp2(torch.linspace(-60, 20, 4000))
        summary = summarize(torch.cat((octaves, -octaves, torch.tensor([torch.nan]))), histogram=True)
        sink = TRACKERS["wandb"].make(tmp_path)
        deliver(sink, [make_step(make_packet(1, {SITE: summary}))])
        ((edges, counts),) = TRACKERS["wandb"].histograms(tmp_path)["activation/layers.0:q_proj"].values()
        assert (len(edges), sum(counts)) == (len(counts) + 1, 8000)
        assert len(counts) <= 512
        assert sink.disclosures == ("histograms of more than 512 bins are shown with down to 2 bins an octave",)

    def test_counts_beyond_float64_are_exact(self, tmp_path):
        packet = make_packet(1, {SITE: summarize(torch.ones(1))})
        packet.ints[0, INT_FIELDS.index("total")] = 2**60 + 1
        deliver(TRACKERS["wandb"].make(tmp_path), [make_step(packet)])
        assert TRACKERS["wandb"].scalars(tmp_path)["activation/layers.0:q_proj/total"] == {1: 2**60 + 1}

    def test_an_active_run_is_used_and_never_finished(self, tmp_path):
        import wandb

        theirs = wandb.init(project="p", dir=str(tmp_path), mode="offline", settings=wandb.Settings(console="off"))
        theirs.log({"loss": 1.0})
        deliver(WandbSink(), steps(1, 2))
        theirs.log({"loss": 0.5})
        assert wandb.run is theirs
        theirs.finish()
        assert len(wandb_files(tmp_path)) == 1
        rows = wandb_rows(tmp_path)
        assert [row.get("loss", row.get("rankfold/step")) for row in rows] == [1.0, 1, 2, 0.5]
        assert theirs.config["rankfold"]["run"] == {"model": "tiny", "lr": None}

    def test_a_run_of_the_sinks_own_leaves_the_active_one_alone(self, tmp_path):
        import wandb

        theirs = wandb.init(project="p", dir=str(tmp_path), mode="offline", settings=wandb.Settings(console="off"))
        deliver(TRACKERS["wandb"].make(tmp_path), steps(1, 1))
        assert wandb.run is theirs
        theirs.log({"loss": 0.5})
        theirs.finish()
        assert len(wandb_files(tmp_path)) == 2

    def test_findings_are_text_of_the_row(self, tmp_path):
        deliver(TRACKERS["wandb"].make(tmp_path), steps(4, 4, findings=[{"code": "c", "message": "rank 2 first"}]))
        (row,) = wandb_rows(tmp_path)
        assert row["rankfold/findings_text"] == "**c** rank 2 first"


class TestMlflow:
    @pytest.fixture
    def mlflow(self, tmp_path):
        mlflow = pytest.importorskip("mlflow")
        before = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
        yield mlflow
        mlflow.set_tracking_uri(before)

    def test_the_active_run_of_the_thread_that_makes_the_sink_is_used_and_never_ended(self, mlflow):
        from aggregator.sinks import MlflowSink

        with mlflow.start_run() as theirs:
            deliver(MlflowSink(), steps(1, 2))
            assert mlflow.MlflowClient().get_run(theirs.info.run_id).info.status == "RUNNING"
            mlflow.log_metric("loss", 0.5, step=2)
        metrics = mlflow.MlflowClient().get_run(theirs.info.run_id).data.metrics
        assert (metrics["loss"], metrics["activation/layers.0:q_proj/min"]) == (0.5, -3.0)

    def test_a_run_of_the_sinks_own_is_ended_and_found_again_by_the_next_attempt(self, tmp_path):
        of = TRACKERS["mlflow"]
        for segment in range(2):
            deliver(of.make(tmp_path), steps(1, 1, segment=segment), run_info(segment))
        client, (run,) = of.runs(tmp_path)
        assert run.info.status == "FINISHED"
        assert run.data.tags["rankfold.run_id"] == "0123456789abcdef"
        assert [one.path for one in client.list_artifacts(run.info.run_id, "rankfold")] == [
            "rankfold/histograms",
            "rankfold/run-00000.json",
            "rankfold/run-00001.json",
        ]

    def test_names_that_it_does_not_take_are_changed_and_disclosed(self, tmp_path):
        summary = summarize(torch.ones(2))
        sink = TRACKERS["mlflow"].make(tmp_path)
        odd, dots = make_site("fsdp<0>@x"), make_site("a/../b")
        deliver(sink, [make_step(make_packet(1, {odd: summary, dots: summary}))])
        tags = {tag for tag in TRACKERS["mlflow"].scalars(tmp_path) if tag.endswith("/rms")}
        assert len(tags) == 2
        assert all("_0__x-" in tag or "a/_/b-" in tag for tag in tags)
        assert sink.disclosures[0].startswith("2 names were changed: ")

    def test_more_values_than_one_batch_takes_arrive(self, tmp_path):
        observed = {make_site(f"layers.{i}"): summarize(torch.ones(2)) for i in range(120)}
        deliver(TRACKERS["mlflow"].make(tmp_path), [make_step(make_packet(1, observed))])
        _, (run,) = TRACKERS["mlflow"].runs(tmp_path)
        assert len(run.data.metrics) == 120 * 10 + 5


class TestComet:
    def test_a_running_experiment_is_used_and_never_ended(self, tmp_path):
        comet_ml = pytest.importorskip("comet_ml")
        from aggregator.sinks import CometSink

        theirs = comet_ml.OfflineExperiment(offline_directory=str(tmp_path / "comet"), display_summary_level=0)
        deliver(CometSink(), steps(1, 2))
        assert comet_ml.get_running_experiment() is theirs
        theirs.log_metric("loss", 0.5, step=2)
        theirs.end()
        shown = TRACKERS["comet"].scalars(tmp_path)
        assert TRACKERS["comet"].num_runs(tmp_path) == 1
        assert (shown["loss"], shown["activation/layers.0:q_proj/min"]) == ({2: 0.5}, {1: -3.0, 2: -3.0})

    def test_both_attempts_are_of_one_experiment(self, tmp_path):
        import json
        import zipfile

        of = TRACKERS["comet"]
        for segment in range(2):
            deliver(of.make(tmp_path), steps(1, 1, segment=segment), run_info(segment))
        about = [json.loads(zipfile.ZipFile(path).read("experiment.json")) for path in of.archives(tmp_path)]
        assert len({one["offline_id"] for one in about}) == 1
        assert {one["resume_strategy"] for one in about} == {"get_or_create"}


class TestMetricLogger:
    def test_histograms_that_are_asked_for_are_refused_by_name(self, tmp_path):
        sink = TRACKERS["metric_logger"].make(tmp_path, histograms=True)
        with pytest.raises(SinkCapabilityError, match="asked for raw_histogram, and carries scalar"):
            admit_sinks([sink], RunPlan((), DEFAULT_DESCRIPTOR))

    def test_what_cannot_log_is_refused_when_the_sink_is_made(self):
        with pytest.raises(ConfigurationError, match="no log_metrics"):
            MetricLoggerSink(print)


def train_into_a_writer(rank, world_size, folder):
    """Only rank zero has a SummaryWriter, as training scripts do; every rank makes the sink."""
    writer = SummaryWriter(str(folder / "tb")) if rank == 0 else None
    report = train(rank, world_size, folder / "run", sinks=[TensorBoardSink(writer=writer)])["report"]
    if writer is not None:
        writer.add_scalar("loss", 0.5, STEPS)
        writer.close()
    return report


def test_a_writer_that_only_rank_zero_has_is_written_into_and_left_open(tmp_path):
    report, _ = run_ranks(train_into_a_writer, 2, tmp_path)
    assert report.merge.sinks[0].state == "ok"
    shown = TRACKERS["tensorboard"].scalars(tmp_path)
    assert shown["loss"] == {STEPS: 0.5}
    assert list(shown["gradient/body.0.weight/rms"]) == list(range(1, STEPS + 1))
    assert TRACKERS["tensorboard"].num_runs(tmp_path) == 1


def test_a_refusal_at_attach_reaches_every_rank_and_leaves_no_run(tmp_path):
    for outcome in run_ranks(refused, 2, tmp_path):
        assert outcome == "sink_unavailable: TensorBoardSink has no target"
    assert not (tmp_path / "run").exists()


def refused(rank, world_size, folder):
    try:
        train(rank, world_size, folder / "run", sinks=[TensorBoardSink()])
    except SinkUnavailableError as error:
        return f"{error.code}: {error.message}"
    return "not refused"
