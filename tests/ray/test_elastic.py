"""The world of a run may change at a step boundary: a rank leaves, another joins, one is replaced."""

from __future__ import annotations

import time

from aggregator import open_history
from telemetry.errors import SketchDescriptorMismatchError
from telemetry.summary import HistogramDescriptor
from tests.ray.clusters import PATIENT, Rank, in_parallel, world


def coverage(path):
    table = open_history(path).coverage().to_pylist()
    return [(row["step"], row["num_ranks"], row["world_size"], row["missing_ranks"]) for row in table]


def submit(ranks, step):
    for rank in ranks:
        rank.submit(step)
    for rank in ranks:
        rank.wait_until_settled()


def test_a_rank_leaves_another_joins_and_nobody_is_missing(cluster, name, tmp_path):
    run = tmp_path / "run"
    ranks = world(3, name, run)
    in_parallel([rank.attach for rank in ranks])
    submit(ranks, 1)
    # Rank 2 leaves: its close returns as soon as the others go on, with the account so far.
    begun = time.monotonic()
    report, _ = in_parallel([ranks[2].close, lambda: (time.sleep(0.5), submit(ranks[:2], 2))])
    assert time.monotonic() - begun < PATIENT.close_s / 2
    assert (report.failure, report.missing_ranks) == (None, ())
    assert report.num_committed in (1, 2)
    joiner = Rank(3, 4, name, str(run), "attempt")
    assert joiner.attach() == ranks[0].reply
    grown = [*ranks[:2], joiner]
    submit(grown, 3)
    # One that believes in another run is refused alone, and the others do not notice.
    stranger = Rank(4, 4, name, str(run), "attempt")
    (refusal,) = in_parallel([lambda: stranger.attach(descriptor=HistogramDescriptor(bins_per_octave=8))])
    assert type(refusal) is SketchDescriptorMismatchError
    submit(grown, 4)
    reports = in_parallel([rank.close for rank in grown])
    assert [(r.num_committed, r.num_partial, r.failure) for r in reports] == [(4, 0, None)] * 3
    assert coverage(run) == [(1, 3, 3, []), (2, 2, 2, []), (3, 3, 3, []), (4, 3, 3, [])]
    told = [f["message"] for f in reports[0].findings if f["code"] == "world_changed"]
    assert told == ["rank 2 left after step 1", "rank 3 joined after step 2"]


def test_a_new_process_of_a_rank_takes_its_place_from_the_next_step_on(cluster, name, tmp_path):
    run = tmp_path / "run"
    ranks = world(2, name, run)
    in_parallel([rank.attach for rank in ranks])
    submit(ranks, 1)
    again = Rank(1, 2, name, str(run), "attempt")
    assert again.attach() == ranks[0].reply
    submit([ranks[0], again], 2)
    assert [r.num_committed for r in in_parallel([ranks[0].close, again.close])] == [2, 2]
    assert coverage(run) == [(1, 2, 2, []), (2, 2, 2, [])]


def test_ranks_that_go_back_in_one_process_begin_a_segment_through_the_actor_too(cluster, name, tmp_path):
    run = tmp_path / "run"
    ranks = world(2, name, run)
    in_parallel([rank.attach for rank in ranks])
    for step in (1, 2, 3):
        submit(ranks, step)
    for rank in ranks:
        rank.begin_segment(resume_step=2)
    submit(ranks, 2)
    assert {report.num_committed for report in in_parallel([rank.close for rank in ranks])} == {4}
    assert coverage(run) == [(1, 2, 2, []), (2, 2, 2, [])]
    assert open_history(run).segments().column("resume_step").to_pylist() == [None, 2]
