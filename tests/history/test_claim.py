"""Who may write into a run directory, and what becomes of whom a successor has overtaken."""

import contextlib
import itertools
import os
import random
import threading
import time

import pytest
import torch

from aggregator.history import HistoryWriter, fence, open_history
from aggregator.testing.packets import make_packet, make_site, make_step
from telemetry.errors import (
    ConfigurationError,
    RunDirectoryForeignError,
    RunDirectoryInUseError,
    RunDirectoryMissingRunError,
    RunDirectoryUnwritableError,
    SketchDescriptorMismatchError,
    StepOrderError,
    WriterFencedError,
)
from telemetry.summary import DEFAULT_DESCRIPTOR, HistogramDescriptor, summarize
from tests.history.conftest import refuse_link
from tests.history.history_processes import CONTEXT, claim_at_barrier, packet_of


def create(path, resume_step=None):
    return HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, resume_step)


def commit(writer, *steps):
    for step in steps:
        writer.commit(make_step(packet_of(step)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("racers", [6, pytest.param(64, marks=pytest.mark.full)])
def test_of_many_processes_that_race_for_one_directory_exactly_one_begins_the_run(tmp_path, racers):
    told = CONTEXT.Queue()
    barrier = CONTEXT.Barrier(racers)
    processes = [
        CONTEXT.Process(target=claim_at_barrier, args=(tmp_path / "a" / "run", barrier, told), daemon=True)
        for _ in range(racers)
    ]
    for process in processes:
        process.start()
    outcomes = [told.get(timeout=200) for _ in processes]
    for process in processes:
        process.join(timeout=10)
    assert outcomes.count("run_directory_in_use") == racers - 1
    (winner,) = (outcome for outcome in outcomes if outcome != "run_directory_in_use")
    assert open_history(tmp_path / "a" / "run").run_id == winner


def test_a_directory_with_a_run_refuses_and_says_how_to_go_on(tmp_path):
    commit(create(tmp_path), 1, 2, 57)
    with pytest.raises(RunDirectoryInUseError, match=r"steps up to 57\n.*resume_step=n .*resume_step=58") as refused:
        create(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryForeignError, match=r"notes\.txt"):
        create(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunDirectoryUnwritableError, match="file"):
            create(path)


def test_resuming_where_there_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunDirectoryMissingRunError, match="resume_step=3"):
        create(tmp_path, resume_step=3)


def test_resuming_with_another_grid_is_refused(tmp_path):
    create(tmp_path)
    with pytest.raises(SketchDescriptorMismatchError):
        HistoryWriter.create(tmp_path, {}, HistogramDescriptor(bins_per_octave=2), 5)


def test_a_run_record_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigurationError, match="not JSON"):
        HistoryWriter.create(tmp_path, {"model": object()}, DEFAULT_DESCRIPTOR)
    create(tmp_path)


def test_a_resumed_run_shows_one_row_a_step_and_keeps_what_it_superseded(tmp_path):
    first = create(tmp_path)
    commit(first, *range(100, 151))
    second = create(tmp_path, resume_step=101)
    commit(second, *range(101, 121))
    third = create(tmp_path, resume_step=111)
    commit(third, 111, 112)
    assert (second.segment, third.segment, third.run_id) == (1, 2, first.run_id)
    history = open_history(tmp_path)
    assert history.steps()["step"].to_pylist() == list(range(100, 113))
    assert history.series("layers.0", "activation", "max")["value"].to_pylist() == [float(n) for n in range(100, 113)]
    everything = history.steps(include_superseded=True)
    assert everything.num_rows == 51 + 20 + 2
    assert sum(everything["superseded"].to_pylist()) == 50 + 10
    segments = history.segments().select(["segment", "parent", "resume_step", "last_step", "end_step", "sealed"])
    assert segments.to_pylist() == [
        {"segment": 0, "parent": None, "resume_step": None, "last_step": 150, "end_step": 101, "sealed": True},
        {"segment": 1, "parent": 0, "resume_step": 101, "last_step": 120, "end_step": 111, "sealed": True},
        {"segment": 2, "parent": 1, "resume_step": 111, "last_step": 112, "end_step": None, "sealed": False},
    ]


def test_a_later_attempt_that_goes_further_back_supersedes_all_before_it(tmp_path):
    commit(create(tmp_path), 1, 2, 3, 4)
    commit(create(tmp_path, resume_step=4), 4, 5)
    commit(create(tmp_path, resume_step=2), 2)
    assert open_history(tmp_path).steps().select(["step", "segment"]).to_pydict() == {"step": [1, 2], "segment": [0, 2]}


def test_a_segment_refuses_steps_before_its_start(tmp_path):
    create(tmp_path)
    with pytest.raises(StepOrderError, match="resume_step=10"):
        commit(create(tmp_path, resume_step=10), 9)


def test_a_writer_that_still_lives_after_its_successor_began_cannot_add_a_step(tmp_path):
    old = create(tmp_path)
    commit(old, 1, 2)
    new = create(tmp_path, resume_step=3)
    for _ in range(2):
        with pytest.raises(WriterFencedError, match="after segment 0"):
            commit(old, 3)
    commit(new, 3)
    old.close()
    rows = open_history(tmp_path).steps(include_superseded=True)
    assert rows.select(["step", "segment"]).to_pydict() == {"step": [1, 2, 3], "segment": [0, 0, 1]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [5, pytest.param(100, marks=pytest.mark.full)])
def test_a_writer_that_goes_on_beside_its_successor_is_fenced_every_time(tmp_path, file_system, times):
    chance = random.Random(7)
    for i in range(times):
        path = tmp_path / str(i)
        old, kept, stop = create(path), [], threading.Event()

        def go_on(old=old, kept=kept, stop=stop):
            with contextlib.suppress(WriterFencedError):
                for step in itertools.count():
                    commit(old, step)
                    kept.append(step)
            stop.set()

        zombie = threading.Thread(target=go_on, daemon=True)
        zombie.start()
        time.sleep(chance.random() * 0.02)  # Where in its commit the zombie is overtaken is what is random here.
        new = create(path, resume_step=1000)
        commit(new, 1000)
        assert stop.wait(50), "the zombie was never fenced"
        commit(new, 1001)
        *old_steps, first, second = open_history(path).steps()["step"].to_pylist()
        assert (first, second) == (1000, 1001)
        # A step that was on its way may be in the record without having been acknowledged, never the reverse.
        assert old_steps in (kept, [*kept, len(kept)])


def test_a_writer_that_is_overtaken_in_the_middle_of_its_work_keeps_all_that_it_acknowledged(tmp_path, file_system):
    acknowledged = []

    def go_on(writer):
        with contextlib.suppress(WriterFencedError):
            for step in itertools.count(writer.resume_step or 0):
                commit(writer, step)
                acknowledged.append((writer.segment, step))

    resume_step = None
    threads = []
    for _ in range(6):
        threads.append(threading.Thread(target=go_on, args=(create(tmp_path, resume_step),), daemon=True))
        threads[-1].start()
        before = len(acknowledged)
        deadline = time.monotonic() + 20
        while len(acknowledged) < before + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        resume_step = 2
    create(tmp_path, 2)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    rows = open_history(tmp_path).steps(include_superseded=True)
    committed = list(zip(rows["segment"].to_pylist(), rows["step"].to_pylist(), strict=True))
    assert len(acknowledged) >= 18
    assert len(set(committed)) == len(committed)
    unacknowledged = set(committed) - set(acknowledged)
    assert set(acknowledged) <= set(committed)
    # A step that was on its way when its writer was overtaken may be in the record although nobody was told so: the
    # last one of that writer, and no other.
    last = {segment: max(step for other, step in committed if other == segment) for segment, _ in committed}
    assert all(step == last[segment] for segment, step in unacknowledged)


def test_of_threads_that_race_where_there_are_no_links_exactly_one_begins_the_run(tmp_path, file_system):
    outcomes, barrier = [], threading.Barrier(8)

    def race():
        barrier.wait(50)
        try:
            outcomes.append(create(tmp_path / "run").run_id)
        except RunDirectoryInUseError:
            outcomes.append("refused")

    threads = [threading.Thread(target=race, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert outcomes.count("refused") == 7
    assert open_history(tmp_path / "run").run_id in outcomes


def test_the_way_to_publish_is_chosen_when_the_run_begins_and_kept(tmp_path, file_system):
    commit(create(tmp_path), 1)
    ways = {"with links": "link", "without links": "claim"}
    assert open_history(tmp_path).manifest["publish"] == ways[file_system]
    writer = create(tmp_path, resume_step=2)
    commit(writer, 2, 3)
    writer.close()
    assert open_history(tmp_path).steps()["step"].to_pylist() == [1, 2, 3]


def test_a_writer_that_outruns_the_seal_of_its_successor_is_sealed_where_it_then_is(tmp_path, monkeypatch, file_system):
    old, read, calls = create(tmp_path), fence.newest_index, []
    commit(old, 1)

    def outrun(folder):
        index = read(folder)
        calls.append(index)
        if len(calls) == 2:  # The successor has read where it wants to seal, and not sealed yet.
            commit(old, 2, 3, 4, 5)
        return index

    monkeypatch.setattr(fence, "newest_index", outrun)
    new = create(tmp_path, resume_step=6)
    with pytest.raises(WriterFencedError):
        commit(old, 6)
    commit(new, 6)
    assert open_history(tmp_path).steps()["step"].to_pylist() == [1, 2, 3, 4, 5, 6]


def test_a_writer_that_is_overtaken_between_its_claim_and_its_rename_does_not_acknowledge(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", refuse_link)
    old, rename, made = create(tmp_path), os.rename, []

    def overtaken(source, target):
        if "index" in str(target):
            monkeypatch.setattr(os, "rename", rename)
            made.append(create(tmp_path, resume_step=5))
        rename(source, target)

    commit(old, 1)
    monkeypatch.setattr(os, "rename", overtaken)
    with pytest.raises(WriterFencedError):
        commit(old, 2)
    commit(made[0], 5)
    assert open_history(tmp_path).steps()["step"].to_pylist() == [1, 5]


def test_a_successor_fences_a_writer_that_has_not_committed_yet(tmp_path):
    old = create(tmp_path)
    create(tmp_path, resume_step=1)
    with pytest.raises(WriterFencedError):
        commit(old, 1)


def test_a_continuation_that_knows_who_wrote_before_is_refused_if_somebody_else_was_first(tmp_path):
    commit(create(tmp_path), 1)
    commit(create(tmp_path, resume_step=2), 2)
    with pytest.raises(RunDirectoryInUseError, match="seg-00001"):
        HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR, 3, after=0)
    commit(HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR, 3, after=1), 3)
    assert open_history(tmp_path).steps().column("step").to_pylist() == [1, 2, 3]


def test_a_claim_that_is_withdrawn_leaves_the_directory_free(tmp_path):
    create(tmp_path).withdraw()
    assert list(tmp_path.iterdir()) == []
    commit(create(tmp_path), 1)
    create(tmp_path, resume_step=2).withdraw()
    commit(create(tmp_path, resume_step=2), 2)
    assert open_history(tmp_path).steps()["step"].to_pylist() == [1, 2]


def test_a_reader_that_saw_a_withdrawn_attempt_sees_the_next_one_as_it_is(tmp_path):
    commit(create(tmp_path), *range(10))
    withdrawn = create(tmp_path, resume_step=3)
    history = open_history(tmp_path)
    assert history.steps().num_rows == 3
    withdrawn.withdraw()
    create(tmp_path, resume_step=8)
    assert history.steps().num_rows == 8


def test_a_site_that_only_superseded_steps_saw_is_not_listed(tmp_path):
    first = create(tmp_path)
    first.commit(make_step(make_packet(1, {make_site("early"): summarize(torch.ones(2))})))
    first.commit(make_step(make_packet(2, {make_site("abandoned"): summarize(torch.ones(2))})))
    commit(create(tmp_path, resume_step=2), 2)
    assert "abandoned" not in open_history(tmp_path).sites()["site"].to_pylist()
