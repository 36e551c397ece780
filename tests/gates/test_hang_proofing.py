"""The gate of a stopped rank fails where others wait, say nothing, or where the record does."""

import pytest
import torch

from aggregator.catalogue import Catalogue
from aggregator.history import HistoryWriter
from aggregator.testing.packets import make_packet, make_site, make_step
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize
from tests.gates.sabotage import gate_named, reason_of, rehearsed, sabotaged

VICTIM = 2
GATE = gate_named("hang-proofing").run.__globals__
SITE = make_site("a")


def loop_of(rank, **changes):
    """What a rank tells that trained on at 20 ms a step, with the stop at the tenth step and given up 5 s later."""
    told = {
        "ends": [0.02 * step for step in range(300)],
        "stopped_at": 0.2 if rank == VICTIM else None,
        "failed_at": 5.2,
        "failure": "rank 2 missing at step 11",
        "missing": [VICTIM],
        "close_s": 2.0,
    }
    return {**told, **changes}


def record(path, num_complete=10, missing=VICTIM):
    """Write steps of all ranks, then one without ``missing``."""
    summary = summarize(torch.ones(4), histogram=True)
    writer, catalogue = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR), Catalogue()
    for step in range(1, num_complete + 2):
        absent = {missing: "brought nothing"} if step > num_complete else {}
        writer.commit(make_step(make_packet(step, {SITE: summary}, world_size=3), catalogue, absent))
    writer.close()
    return path


def measure(tmp_path, changes=(), **record_changes):
    told = {rank: loop_of(rank, **dict(changes)) if rank == 1 else loop_of(rank) for rank in range(3)}
    run = record(tmp_path / "run", **record_changes)
    return {**GATE["judge_ranks"](told, VICTIM), **GATE["read_record"](run, VICTIM)}


def test_it_passes_where_all_name_the_rank_and_train_on(tmp_path):
    assert reason_of("hang-proofing", measure(tmp_path)) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"missing": []}, "other ranks that did not name the stopped rank is 1, has to be equal to 0"),
        ({"missing": [0]}, "other ranks that did not name the stopped rank is 1, has to be equal to 0"),
        ({"failed_at": None}, "other ranks that did not give up is 1, has to be equal to 0"),
        ({"failed_at": 90.0}, "longest time until another rank gave up is 89.8, has to be at most 30 s"),
        ({"ends": [0.0, 0.1, 0.2, 0.3, 5.3, *range(6, 40)]}, "longest pause of another rank's loop is 5, has to be"),
        ({"ends": [0.02 * step for step in range(20)]}, "fewest steps another rank made after the stop is 9, has to"),
        ({"close_s": 60.0}, "longest close of another rank is 60, has to be at most 15 s"),
    ],
)
def test_one_rank_that_waits_or_says_nothing_fails_it(tmp_path, changes, reason):
    assert reason in reason_of("hang-proofing", measure(tmp_path, changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_complete": 8}, "steps that left every rank and are not in the record is 2, has to be equal to 0"),
        ({"missing": 1}, "records of rank zero that do not name the stopped rank is 1, has to be equal to 0"),
    ],
)
def test_a_record_that_lacks_steps_or_the_name_fails_it(tmp_path, changes, reason):
    assert reason_of("hang-proofing", measure(tmp_path, **changes)) == reason


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("merge_s=5,", "merge_s=300,", "other ranks that did not give up is 2"),
        ("time.sleep(0.02)", "time.sleep(4 if len(ends) == 15 else 0.02)", "longest pause of another rank's loop is 4"),
    ],
)
def test_as_a_job_it_fails_where_telemetry_never_gives_up_or_the_loop_waits(tmp_path, old, new, reason):
    verdict, why = rehearsed(sabotaged("hang-proofing", tmp_path, old, new), tmp_path)
    assert (verdict, reason in why) == ("failed", True), why
