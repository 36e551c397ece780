"""Steps in memory are bounded, what gives way is what the caller chose, and what is there reads as from a directory."""

import gc
import threading
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from aggregator.catalogue import Catalogue
from aggregator.history import Cursor, HistoryWriter, open_history, recent_history
from aggregator.history.intake import Intake
from aggregator.history.memory import RecentSteps
from aggregator.history.memory_run import MemoryTarget, MemoryWriter, forget
from aggregator.testing.packets import make_packet, make_site, make_step
from telemetry.errors import (
    ConfigurationError,
    HistoryFullError,
    HistoryNotFoundError,
    RunDirectoryInUseError,
    RunDirectoryMissingRunError,
    SketchDescriptorMismatchError,
    StepOrderError,
)
from telemetry.presence import Presence
from telemetry.replicas import ReplicaTable
from telemetry.summary import DEFAULT_DESCRIPTOR, INT_FIELDS, HistogramDescriptor, summarize

A, B = make_site("a"), make_site("b")
SAMPLED = make_site("sampled", "update", numel=100, estimated=True)
# Two contents of one part of the site: the copies that two ranks hold are not the same.
TWO_CONTENTS = ReplicaTable(
    sites=np.full(2, A.site_id, np.uint64),
    slots=np.zeros(2, np.int64),
    fingerprints=np.array([1, 2]),
    num_ranks=np.ones(2, np.int32),
    ranks=np.array([[0, *[-1] * 7], [1, *[-1] * 7]], np.int32),
    digests=np.zeros((2, 4)),
)
FIELDS = ["total", "sum", "m2", "max", "rms", "std"]
NAMES = count()


@pytest.fixture
def name():
    chosen = f"run-{next(NAMES)}"
    yield chosen
    forget(chosen)


def values(step):
    return torch.arange(4.0) + step


def packet_of(step, **changes):
    observed = {A: summarize(values(step), histogram=True), SAMPLED: summarize(torch.full((10,), 2.0))}
    if step % 3 == 0:
        observed[B] = summarize(values(step) * 2)
    return make_packet(step, observed, **changes)


def fill(writer, steps, **changes):
    catalogue = Catalogue()
    for step in steps:
        assert writer.append(make_step(packet_of(step, **changes), catalogue)).result().step == step


def written(name, options, steps):
    writer = MemoryWriter.create(f"memory://{name}{options}", {"x": 1}, DEFAULT_DESCRIPTOR)
    fill(writer, steps)
    return writer


def test_a_run_in_memory_reads_exactly_as_one_in_a_directory(tmp_path, name):
    writer = HistoryWriter.create(tmp_path, {"x": 1}, DEFAULT_DESCRIPTOR)
    fill(writer, range(1, 20))
    written(name, "", range(1, 20)).close()
    disk, memory = open_history(tmp_path), open_history(f"memory://{name}")
    for read in (
        lambda history: history.observations(),
        lambda history: history.observations("a", columns=["step", "std", "hist_bins"], steps=range(3, 9, 2)),
        lambda history: history.observation_batches(kinds="update").read_all(),
        lambda history: history.steps(),
        lambda history: history.coverage(),
        lambda history: history.findings(),
        lambda history: history.sites(),
        lambda history: history.series("sampled", "update", "l2"),
        lambda history: history.quantiles("a", "activation"),
        lambda history: history.coarsen(5),
        lambda history: history.follow(Cursor(0, 7)).observations,
    ):
        assert read(memory).to_pylist() == read(disk).to_pylist()
    assert (memory.histogram("a", "activation", 4).counts == disk.histogram("a", "activation", 4).counts).all()
    assert memory.manifest["run"] == {"x": 1}
    assert memory.segments()["last_step"].to_pylist() == [19]


def test_refuse_says_as_soon_as_it_is_full_what_can_be_done_and_keeps_what_is_there(name):
    writer = written(name, "?keep=4", range(3))
    assert writer.failure is None
    fill(writer, [3])
    with pytest.raises(HistoryFullError, match=r"4 steps are in memory(.|\n)*give a directory(.|\n)*drop_oldest"):
        raise writer.failure
    with pytest.raises(HistoryFullError):
        writer.append(make_step(packet_of(4)))
    writer.close()
    assert open_history(f"memory://{name}").steps()["step"].to_pylist() == [0, 1, 2, 3]


def test_the_oldest_give_way_and_are_counted_and_the_definitions_of_sites_stay(name):
    writer = written(name, "?keep=4&when_full=drop_oldest", range(10))
    assert writer.failure is None
    history = open_history(f"memory://{name}")
    assert history.steps()["step"].to_pylist() == [6, 7, 8, 9]
    assert history.series("a", "activation", "max")["step"].to_pylist() == [6, 7, 8, 9]
    assert writer._run.steps.num_dropped == 6


def test_coarsening_keeps_every_step_in_bounded_memory_with_exact_counts(name):
    writer = written(name, "?keep=4&when_full=coarsen", range(257))
    recent = writer._run.steps
    assert len(recent) <= 4
    assert recent.num_dropped == 0
    covered = [step for span in recent for step in range(span.step_lo, span.step_hi + 1)]
    assert covered == list(range(257))
    assert sum(span.num_steps for span in recent) == 257
    history = open_history(f"memory://{name}")
    rows = history.observations("a", columns=["step", *INT_FIELDS, *FIELDS, "num_contributing"]).to_pylist()
    assert [row["step"] for row in rows] == [span.step_hi for span in recent] == history.steps()["step"].to_pylist()
    for span, row in zip(recent, rows, strict=True):
        steps = range(span.step_lo, span.step_hi + 1)
        whole = summarize(torch.cat([values(step) for step in steps]), histogram=True)
        assert {field: row[field] for field in INT_FIELDS} == {
            **{field: getattr(whole, field) for field in INT_FIELDS},
            "calls": len(steps),
        }
        assert {field: row[field] for field in FIELDS} == pytest.approx(
            {field: getattr(whole, field) for field in FIELDS}, rel=1e-9, abs=1e-9
        )
        counts = history.histogram("a", "activation", span.step_hi).counts
        assert counts.tolist() == whole.histogram.counts.tolist()
        assert row["num_contributing"] == 1
    # A site that was scheduled at every third step stands beside the others.
    due = {span.step_hi: sum(step % 3 == 0 for step in range(span.step_lo, span.step_hi + 1)) for span in recent}
    totals = {row["step"]: row["total"] for row in history.observations("b", columns=["step", "total"]).to_pylist()}
    assert totals == {step: 4 * count for step, count in due.items() if count}
    replayed = [int(step.packet.ints[:, 0].sum()) for step in history.merged_steps()]
    assert sum(replayed) == 257 * (4 + 10) + 4 * 86


def test_estimates_of_a_coarse_span_stand_for_all_of_its_steps(name):
    written(name, "?keep=2&when_full=coarsen", range(64))
    history = open_history(f"memory://{name}")
    rows = history.observations("sampled", columns=["step", "sum"]).to_pylist()
    # 10 of 100 elements are sampled, each of them 2.
    assert sum(row["sum"] for row in rows) == 64 * 200.0
    coarse = history.coarsen(1000, "sampled", fields=["total", "sum"]).to_pylist()
    assert [(row["step_lo"], row["step_hi"], row["num_steps"], row["num_observed_steps"]) for row in coarse] == [
        (0, 63, 64, 64)
    ]
    assert (coarse[0]["total"], coarse[0]["sum"]) == (640, 64 * 200.0)


def test_a_coarse_span_never_joins_what_a_site_was_with_what_it_became(name):
    writer = MemoryWriter.create(f"memory://{name}?keep=4&when_full=coarsen", {}, DEFAULT_DESCRIPTOR)
    catalogue = Catalogue()
    for step in range(12):
        numel = 4 if step < 7 else 8
        site = make_site("w", "parameter", numel=numel, placements=(("dp", "replica"),))
        writer.append(make_step(make_packet(step, {site: summarize(torch.ones(numel))}), catalogue))
    history = open_history(f"memory://{name}")
    assert history.sites()["ended_step"].to_pylist() == [7, None]
    for number, numel, steps in ((0, 4, range(7)), (1, 8, range(7, 12))):
        series = history.series("w", "parameter", "total", series=number)["value"].to_pylist()
        assert sum(series) == numel * len(steps)


def test_a_span_has_the_best_state_of_a_row_and_never_forgets_that_replicas_disagreed(name):
    writer = MemoryWriter.create(f"memory://{name}?keep=2&when_full=coarsen", {}, DEFAULT_DESCRIPTOR)
    catalogue = Catalogue()
    for step in range(4):
        seen = {A: summarize(values(step))} if step == 1 else {}
        unseen = {site: (Presence.UNSUPPORTED, f"step {step}") for site in (A, B) if site not in seen}
        packet = make_packet(step, seen, unobserved=unseen)
        if seen:
            packet = replace(packet, replicas=TWO_CONTENTS)
        writer.append(make_step(packet, catalogue))
    columns = ["step", "site", "presence", "reason", "total", "absmax_rank", "replicas"]
    rows = open_history(f"memory://{name}").observations(columns=columns).to_pylist()
    observed = [row for row in rows if row["presence"] == "observed"]
    assert [(row["site"], row["total"], row["absmax_rank"], row["replicas"]) for row in observed] == [
        ("a", 4, 0, "disagree")
    ]
    others = [row for row in rows if row["presence"] != "observed"]
    assert {(row["presence"], row["total"], row["replicas"]) for row in others} == {("unsupported", None, None)}
    assert all(row["reason"].startswith("step") for row in others)


def test_a_replay_in_memory_supersedes_in_the_default_view(name):
    writer = written(name, "", range(6))
    writer = writer.next_segment({"x": 2}, DEFAULT_DESCRIPTOR, 3)
    assert (writer.segment, writer.resume_step) == (1, 3)
    fill(writer, range(3, 5))
    writer.close()
    again = MemoryWriter.create(f"memory://{name}", {}, DEFAULT_DESCRIPTOR, resume_step=5)
    assert (again.segment, again.run_id) == (2, writer.run_id)
    with pytest.raises(StepOrderError):
        again.append(make_step(packet_of(4)))
    fill(again, [5])
    again.close()
    history = open_history(f"memory://{name}")
    steps = history.steps()
    assert list(zip(steps["step"].to_pylist(), steps["segment"].to_pylist(), strict=True)) == [
        (0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)
    ]  # fmt: skip
    assert history.steps(include_superseded=True).num_rows == 9


def test_a_name_in_memory_is_one_run_at_a_time(name):
    to = f"memory://{name}"
    with pytest.raises(RunDirectoryMissingRunError):
        MemoryWriter.create(to, {}, DEFAULT_DESCRIPTOR, resume_step=3)
    with pytest.raises(HistoryNotFoundError, match="this process holds no run"):
        open_history(to)
    writer = written(name, "", [1])
    with pytest.raises(RunDirectoryInUseError, match="another session"):
        MemoryWriter.create(to, {}, DEFAULT_DESCRIPTOR)
    writer.close()
    with pytest.raises(SketchDescriptorMismatchError):
        MemoryWriter.create(to, {}, HistogramDescriptor(bins_per_octave=2), resume_step=2)
    MemoryWriter.create(to, {}, DEFAULT_DESCRIPTOR).withdraw()
    with pytest.raises(HistoryNotFoundError):
        open_history(to)


@pytest.mark.parametrize(
    ("to", "target"),
    [
        ("memory://", MemoryTarget("", 256, "refuse")),
        ("memory://exp?keep=1000", MemoryTarget("exp", 1000, "refuse")),
        ("memory://?when_full=coarsen&keep=2", MemoryTarget("", 2, "coarsen")),
    ],
)
def test_a_destination_in_memory_says_all_in_one_word(to, target):
    assert MemoryTarget.parse(to) == target


@pytest.mark.parametrize(
    "to",
    [
        "memory://a/b",
        "memory://?keep=1",
        "memory://?keep=-5",
        "memory://?keep=many",
        "memory://?keep=٣",
        "memory://?keep",
        "memory://?keep=3&keep=4",
        "memory://?when_full=forget",
        "memory://?when_full=archived",
        "memory://?size=3",
        "memory://?keep=3#x",
    ],
)
def test_a_destination_that_is_malformed_is_refused_with_what_it_should_be(to):
    with pytest.raises(ConfigurationError, match=r"keep=N&when_full=POLICY"):
        MemoryTarget.parse(to)


def test_a_policy_that_is_none_is_refused():
    for arguments in ((4, "forget"), (1, "refuse")):
        with pytest.raises(ConfigurationError):
            RecentSteps(*arguments)


def test_the_newest_steps_of_a_directory_are_read_from_memory_once_they_are_durable(tmp_path):
    writer = HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR)
    catalogue = Catalogue()
    for step in range(300):
        writer.append(make_step(packet_of(step), catalogue))
    writer.flush()
    recent, disk = recent_history(tmp_path), open_history(tmp_path)
    assert recent.steps()["step"].to_pylist() == list(range(44, 300))
    newest = {"steps": range(44, 300)}
    assert recent.observations().to_pylist() == disk.observations(**newest).to_pylist()
    segment = writer.next_segment({}, DEFAULT_DESCRIPTOR, 298)
    segment.append(make_step(packet_of(298))).result(timeout=20)
    assert recent.steps()["step"].to_pylist() == list(range(45, 299))
    assert recent.steps()["segment"].to_pylist()[-2:] == [0, 1]
    segment.close()


def test_a_cache_goes_with_its_writer_and_is_nowhere_else(tmp_path):
    writer = HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR)
    assert recent_history(tmp_path).steps().num_rows == 0
    writer.close()
    del writer
    gc.collect()
    with pytest.raises(HistoryNotFoundError, match="open_history reads it"):
        recent_history(tmp_path)


def test_a_cache_is_bounded_in_bytes():
    recent = RecentSteps(policy="archived", max_bytes=30_000)
    recent.begin_segment(0, {"segment": 0, "resume_step": None, "run": {}})
    intake = Intake(0, None)
    for step in range(200):
        recent.add(step, intake.take(make_step(packet_of(step))))
    assert sum(span.num_bytes for span in recent) <= 30_000
    assert 2 <= len(recent) < 200
    assert recent.num_dropped == 200 - len(recent)


@pytest.mark.timeout(60)
def test_reading_while_steps_are_added_and_coarsened_sees_each_step_once(name):
    writer = MemoryWriter.create(f"memory://{name}?keep=8&when_full=coarsen", {}, DEFAULT_DESCRIPTOR)
    fill(writer, [0])
    writing = threading.Thread(target=lambda: fill(writer, range(1, 400)), daemon=True)
    writing.start()
    history = open_history(f"memory://{name}")
    seen = 0
    while writing.is_alive():
        rows = history.coarsen(1_000_000, "a", fields=["total"]).to_pylist()
        (row,) = rows
        assert row["total"] == 4 * row["num_steps"] == 4 * (row["step_hi"] + 1)
        seen += 1
    writing.join()
    assert seen > 3
