"""What TensorBoard reads back is what the history holds."""

import math
import re
import sys

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard import SummaryWriter

from aggregator.history import HistoryWriter, open_history
from aggregator.sinks import RunInfo, RunPlan, TensorBoardSink, admit_sinks
from aggregator.sinks.tensorboard_checksum import speed_up
from aggregator.sinks.tensorboard_layout import LAYOUT_FIELDS
from aggregator.testing import make_packet, make_site, make_step, make_steps
from telemetry.errors import ConfigurationError, FieldUnknownError, SinkCapabilityError, SinkUnavailableError
from telemetry.packet import StepFacts
from telemetry.presence import Presence
from telemetry.summary import DEFAULT_DESCRIPTOR, SUMMARY_FIELDS, summarize

SITE = make_site("layers.0:q_proj.x-y")
TAG = "activation/layers.0:q_proj.x-y"


def run_info(segment=0, resume_step=None):
    return RunInfo(f"run{segment}", segment, resume_step, 1, DEFAULT_DESCRIPTOR, {"model": "tiny"})


def emit(log_dir, steps, run=None, **options):
    sink = TensorBoardSink(log_dir, **options)
    sink.open(run or run_info())
    for step in steps:
        sink.emit(step)
    sink.flush()
    sink.close()


def read(log_dir):
    events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return events.Reload()


def values_of(log_dir, tag):
    return {event.step: event.value for event in read(log_dir).Scalars(tag)}


def one_step(values, site=SITE, **packet):
    return make_step(make_packet(1, {site: summarize(torch.tensor(values), histogram=True)}, **packet))


def test_every_field_equals_the_history_to_single_precision(tmp_path):
    generator = torch.Generator().manual_seed(3)
    steps = make_steps(make_packet(s, {SITE: summarize(torch.randn(64, generator=generator))}) for s in (10, 20, 35))
    writer = HistoryWriter.create(tmp_path / "run", {}, DEFAULT_DESCRIPTOR)
    for step in steps:
        writer.commit(step)
    emit(tmp_path / "tb", steps, fields=(*SUMMARY_FIELDS, "nonfinite"))
    events, history = read(tmp_path / "tb"), open_history(tmp_path / "run")
    for field in SUMMARY_FIELDS:
        shown = [(event.step, np.float32(event.value)) for event in events.Scalars(f"{TAG}/{field}")]
        stored = history.series(SITE.name, "activation", field).to_pydict()
        assert shown == [(step, np.float32(v)) for step, v in zip(stored["step"], stored["value"], strict=True)]


def test_what_has_no_value_makes_no_point_and_the_nonfinite_count_says_why(tmp_path):
    steps = make_steps(
        [
            make_packet(1, {SITE: summarize(torch.tensor([math.nan, math.inf, 1.0]))}),
            make_packet(2, {SITE: summarize(torch.tensor([math.nan, math.nan]))}),
            make_packet(3, {}, unobserved={SITE: (Presence.SITE_ABSENT, "")}),
            make_packet(4, {SITE: summarize(torch.zeros(2))}),
        ]
    )
    emit(tmp_path, steps)
    assert values_of(tmp_path, f"{TAG}/mean") == {1: 1.0, 4: 0.0}
    assert values_of(tmp_path, f"{TAG}/nonfinite") == {1: 2.0, 2: 2.0, 4: 0.0}
    assert values_of(tmp_path, f"{TAG}/total") == {1: 3.0, 2: 2.0, 4: 2.0}


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 7,
        [0.0],
        [0.0, 1e-12, 1e12],
        [-1e30, -3.0, -1e-30, -0.0, 1e-45, 0.5, 2.0, 1e30, math.nan, math.inf, -math.inf],
        [-2.0] * 3,
        [2.0**16, -(2.0**16)],
    ],
)
def test_a_histogram_has_the_exact_counts_between_ascending_bounds_that_hold_the_values(tmp_path, values):
    emit(tmp_path, [one_step(values)])
    (event,) = read(tmp_path).Histograms(f"{TAG}/histogram")
    histogram, finite = (
        event.histogram_value,
        np.array([v for v in values if math.isfinite(v)], np.float32).astype(float),
    )
    limits, counts = np.array(histogram.bucket_limit), np.array(histogram.bucket)
    assert (np.diff(limits) > 0).all()
    assert np.isfinite(limits).all()
    assert len(limits) <= DEFAULT_DESCRIPTOR.num_counts
    assert counts.sum() == histogram.num == len(finite)
    assert counts[0] == 0
    assert counts[1] > 0
    assert counts[-1] > 0
    assert limits[0] <= finite.min()
    assert finite.max() <= limits[-1]
    assert (histogram.min, histogram.max, histogram.sum) == (finite.min(), finite.max(), pytest.approx(finite.sum()))


def test_histogram_bins_are_those_of_the_history_one_for_one(tmp_path):
    summary = summarize(torch.randn(5000, generator=torch.Generator().manual_seed(5)), histogram=True)
    emit(tmp_path, [make_step(make_packet(1, {SITE: summary}))])
    (event,) = read(tmp_path).Histograms(f"{TAG}/histogram")
    inside = np.trim_zeros(summary.histogram.counts)
    assert [int(count) for count in event.histogram_value.bucket[1:]] == inside.tolist()


def test_without_finite_values_there_is_no_histogram_point(tmp_path):
    emit(tmp_path, [one_step([math.nan, math.inf])])
    assert read(tmp_path).Tags()["histograms"] == []


def test_own_cost_coverage_metadata_and_findings_are_there(tmp_path):
    facts = StepFacts(step_s=0.25, self_s=0.001, wall_time_s=1.7e9)
    finding = {"code": "nan_appeared", "message": "rank 2 first"}
    emit(tmp_path, [one_step([1.0], facts=facts, findings=[finding])])
    assert values_of(tmp_path, "rankfold/self_ms") == {1: 1.0}
    assert values_of(tmp_path, "rankfold/step_ms") == {1: 250.0}
    assert values_of(tmp_path, "rankfold/ranks_merged") == {1: 1.0}
    assert values_of(tmp_path, "rankfold/findings") == {1: 1.0}
    events = read(tmp_path)
    texts = {
        tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in ("rankfold/run/text_summary", "rankfold/findings/text_summary")
    }
    assert '"model":"tiny"' in texts["rankfold/run/text_summary"]
    assert "nan_appeared" in texts["rankfold/findings/text_summary"]
    assert events.Scalars(f"{TAG}/mean")[0].wall_time == 1.7e9


def test_the_norm_of_a_sample_is_not_shown_as_the_norm(tmp_path):
    sampled = make_site("w", "update", numel=1000, estimated=True)
    emit(tmp_path, [one_step([1.0, 1.0], sampled)])
    tags = read(tmp_path).Tags()["scalars"]
    assert "update/w/rms" in tags
    assert "update/w/l2" not in tags


def test_after_a_resume_there_is_one_curve(tmp_path):
    def leg(first, last, value):
        return make_steps(make_packet(s, {SITE: summarize(torch.tensor([value]))}) for s in range(first, last + 1))

    emit(tmp_path, leg(148, 150, 1.0))
    emit(tmp_path, leg(101, 149, 2.0), run_info(segment=1, resume_step=101))
    assert values_of(tmp_path, f"{TAG}/mean") == dict.fromkeys(range(101, 150), 2.0)


def test_a_segment_that_begins_in_the_same_process_hides_what_it_overtakes_in_the_same_file(tmp_path):
    def at(step, value):
        return make_packet(step, {SITE: summarize(torch.tensor([value]), histogram=True)})

    before, after = make_steps(at(s, 1.0) for s in range(1, 6)), make_steps(at(s, 2.0) for s in range(3, 5))
    sink = TensorBoardSink(tmp_path)
    sink.open(run_info())
    for step in before:
        sink.emit(step)
    sink.begin_segment(run_info(1, resume_step=3))
    for step in after:
        sink.emit(step)
    sink.close()
    assert values_of(tmp_path, f"{TAG}/mean") == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    assert [event.step for event in read(tmp_path).Histograms(f"{TAG}/histogram")] == [1, 2, 3, 4]
    assert len(list(tmp_path.iterdir())) == 1
    assert sink.disclosures == ()


def test_two_attempts_in_one_second_have_a_file_each(tmp_path):
    for segment in range(2):
        emit(tmp_path, [one_step([1.0])], run_info(segment))
    assert len(list(tmp_path.iterdir())) == 2


def test_an_unknown_field_is_refused_when_the_sink_is_made(tmp_path):
    with pytest.raises(FieldUnknownError, match="rmss"):
        TensorBoardSink(tmp_path, fields=("rmss",))


def test_checksums_in_c_leave_the_same_bytes_as_tensorboards_own(tmp_path, monkeypatch):
    pytest.importorskip("google_crc32c")
    monkeypatch.setattr("time.time", lambda: 1.7e9)
    facts, files = StepFacts(wall_time_s=1.7e9), []
    step = one_step([1.0, -2.0, 0.0], facts=facts, findings=[{"code": "c", "message": "m"}])
    for folder in ("fast", "slow"):
        emit(tmp_path / folder, [step], run_info(0))
        (file,) = (tmp_path / folder).iterdir()
        files.append(file.read_bytes())
        monkeypatch.setitem(sys.modules, "google_crc32c", None)
    assert files[0] == files[1]


def test_tensorboards_own_checksum_is_not_computed_where_there_is_one_in_c(tmp_path, monkeypatch):
    pytest.importorskip("google_crc32c")

    def too_slow(data):
        raise AssertionError("checksum in Python")

    sink = TensorBoardSink(tmp_path)
    sink.open(run_info())
    with monkeypatch.context() as patched:
        patched.setattr("tensorboard.summary.writer.record_writer.masked_crc32c", too_slow)
        sink.emit(one_step([1.0]))
        sink.flush()
    sink.close()
    assert values_of(tmp_path, f"{TAG}/mean") == {1: 1.0}
    writer = SummaryWriter(str(tmp_path / "theirs"))
    assert speed_up(writer)
    writer.close()


PLAN = RunPlan((SITE,), DEFAULT_DESCRIPTOR)


def test_a_writer_of_the_callers_is_used_and_never_closed(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    emit(None, [one_step([1.0, 3.0])], writer=writer)
    writer.add_scalar("loss", 0.5, 2)
    writer.close()
    assert values_of(tmp_path, f"{TAG}/mean") == {1: 2.0}
    assert values_of(tmp_path, "loss") == {2: 0.5}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_writer_that_its_owner_closed_is_a_failure_with_a_remedy_and_no_second_file(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    sink = TensorBoardSink(writer=writer)
    sink.open(run_info())
    writer.close()
    with pytest.raises(SinkUnavailableError, match="closed by its owner"):
        sink.emit(one_step([1.0]))
    sink.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_how_to_hide_overtaken_points_in_a_writer_of_the_callers_is_disclosed(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    sink = TensorBoardSink(writer=writer)
    sink.open(run_info(1, resume_step=7))
    sink.close()
    writer.close()
    (told,) = sink.disclosures
    assert "unless it was made with purge_step=7" in told


def test_a_target_is_named_once_and_missed_only_where_the_record_is_written(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    with pytest.raises(ConfigurationError, match="a log_dir and a writer"):
        TensorBoardSink(tmp_path, writer=writer)
    writer.close()
    with pytest.raises(SinkUnavailableError, match="no target"):
        admit_sinks([TensorBoardSink()], PLAN)


@pytest.fixture
def wandb_relay():
    tensorboard_patch = pytest.importorskip("wandb.integration.tensorboard")
    tensorboard_patch.patch(save=False, root_logdir="")
    yield
    tensorboard_patch.unpatch()


@pytest.mark.usefixtures("wandb_relay")
def test_a_relay_of_wandbs_is_disclosed_and_gets_no_histograms(tmp_path):
    sink = TensorBoardSink(tmp_path)
    admit_sinks([sink], PLAN)
    sink.open(run_info())
    sink.emit(one_step([1.0, 2.0]))
    sink.close()
    tags = read(tmp_path).Tags()
    assert tags["histograms"] == []
    assert f"{TAG}/rms" in tags["scalars"]
    (told,) = sink.disclosures
    assert told.startswith("wandb copies what TensorBoard's writers get; histograms were left out")


def test_a_relay_that_comes_during_the_run_ends_the_histograms_and_is_disclosed(tmp_path, request):
    sink = TensorBoardSink(tmp_path)
    sink.open(run_info())
    first, second = make_steps(make_packet(s, {SITE: summarize(torch.ones(2), histogram=True)}) for s in (1, 2))
    sink.emit(first)
    request.getfixturevalue("wandb_relay")
    sink.emit(second)
    sink.close()
    assert [event.step for event in read(tmp_path).Histograms(f"{TAG}/histogram")] == [1]
    assert "wandb copies" in sink.disclosures[0]


@pytest.mark.usefixtures("wandb_relay")
def test_histograms_that_are_asked_for_are_refused_at_attach_where_a_relay_listens(tmp_path):
    with pytest.raises(SinkCapabilityError, match="'tensorboard' was asked for raw_histogram"):
        admit_sinks([TensorBoardSink(tmp_path, histograms=True)], PLAN)
    assert list(tmp_path.iterdir()) == []


def test_a_relay_that_wraps_a_method_is_found_by_the_module_that_made_the_wrapper(tmp_path, monkeypatch):
    patching = {"__name__": "clearml.binding.frameworks.tensorflow_bind"}
    exec("def add_event(self, event, step=None, walltime=None): pass", patching)
    patching["add_event"].__module__ = SummaryWriter.__module__
    monkeypatch.setattr("torch.utils.tensorboard.writer.FileWriter.add_event", patching["add_event"])
    assert TensorBoardSink(tmp_path).capabilities == {"scalar", "text", "run_metadata"}


def test_without_a_relay_there_is_nothing_to_disclose(tmp_path):
    sink = TensorBoardSink(tmp_path, histograms=True)
    admit_sinks([sink], PLAN)
    assert sink.disclosures == ()


def layout_of(log_dir):
    layout = layout_pb2.Layout()
    layout.ParseFromString(read(log_dir).Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    return {
        category.title: {chart.title: chart.multiline.tag[0] for chart in category.chart}
        for category in layout.category
    }


def test_the_dashboard_has_a_category_for_each_layer_whose_charts_take_in_its_tags_and_no_others(tmp_path):
    summary = summarize(torch.ones(2))
    names = ("embed", "layers.1", "layers.1.attn", "layers.10", "embedding.w")
    early = {make_site(name): summary for name in names}
    late = {make_site("layers.1.attn.w", "gradient"): summary}
    emit(tmp_path, make_steps([make_packet(1, early), make_packet(2, {**early, **late}), make_packet(3, early)]))
    layout = layout_of(tmp_path)
    assert set(layout) == {"embed", "layers.1", "layers.10", "embedding"}
    assert set(layout["layers.1"]) == {f"{kind} {f}" for kind in ("activation", "gradient") for f in LAYOUT_FIELDS}
    tags = read(tmp_path).Tags()["scalars"]

    def taken(layer, chart):
        return {tag for tag in tags if re.match(layout[layer][chart], tag)}

    assert taken("layers.1", "activation rms") == {"activation/layers.1/rms", "activation/layers.1.attn/rms"}
    assert taken("layers.1", "gradient absmax") == {"gradient/layers.1.attn.w/absmax"}
    assert taken("embed", "activation rms") == {"activation/embed/rms"}
    assert len(read(tmp_path).Tensors("custom_scalars__config__")) == 2


def test_there_is_no_dashboard_where_none_is_wanted(tmp_path):
    emit(tmp_path, [one_step([1.0])], layout=False)
    assert "custom_scalars__config__" not in read(tmp_path).Tags()["tensors"]
