"""The gate of a lost link fails where a side waits, says nothing or loses steps, and where no link was lost at all."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aggregator.catalogue import Catalogue
from aggregator.history import HistoryWriter
from aggregator.testing.packets import make_packet, make_site, make_step
from launch.gates import NotRunError, Trial
from telemetry.packet import StepFacts
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize
from tests.gates.sabotage import gate_named, reason_of, rehearsed, sabotaged

NAME, CUT_AT = "two-node-link-loss", 24.0
GATE = gate_named(NAME).run.__globals__
SITE = make_site("a")
SHORT_LOSS = "longest merge in the short loss is 0.01, has to be at least 4 s"


def loop_of(rank, **changes):
    """What one of four ranks on two nodes tells, at 0.1 s a step, given up 15 s after the final loss."""
    told = {
        "node": rank // 2,
        "ends": [0.1 * step for step in range(1, 420)],
        "failed_at": CUT_AT + 15.0,
        "failure": "missing",
        "missing": [2, 3] if rank < 2 else [0],
        "close_s": 2.0,
    }
    return {**told, **changes}


def record(path, lost=(), named=(2, 3), longest_merge_s=5.5):
    """Write the steps that the loops log, each with its wait, and the one that the final loss ended."""
    summary = summarize(torch.ones(4), histogram=True)
    writer, catalogue = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR), Catalogue()
    for step in range(12, 253, 12):
        if step not in lost:
            absent = dict.fromkeys(named, "brought nothing") if step == 252 else {}
            packet = make_packet(step, {SITE: summary}, world_size=4, facts=StepFacts(num_applied=1))
            merged = make_step(packet, catalogue, absent)
            writer.commit(replace(merged, merge_s=longest_merge_s if step == 48 else 0.01))
    writer.close()
    return path


def measure(tmp_path, changes=(), **record_changes):
    told = {rank: loop_of(rank, **dict(changes)) if rank == 1 else loop_of(rank) for rank in range(4)}
    run = record(tmp_path / "run", **record_changes)
    return reason_of(NAME, {**GATE["judge_ranks"](told, CUT_AT), **GATE["read_record"](run, told, CUT_AT)})


def test_it_passes_where_both_sides_give_up_in_time_and_name_the_other(tmp_path):
    assert measure(tmp_path) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failed_at": 9.0}, "ranks that gave up in the short loss is 1, has to be equal to 0"),
        ({"failed_at": None}, "ranks that did not give up after the final loss is 1, has to be equal to 0"),
        ({"failed_at": CUT_AT + 60}, "longest time until a rank gave up is 60, has to be at most 45 s"),
        ({"missing": []}, "ranks that named nobody on the other side is 1, has to be equal to 0"),
        ({"missing": [0]}, "ranks that named nobody on the other side is 1, has to be equal to 0"),
        ({"ends": [0.1, 0.2, 0.3, 0.4, *range(6, 40)]}, "longest pause of a loop is 5.6, has to be at most 2.5 s"),
        ({"close_s": 30.0}, "longest close of a rank is 30, has to be at most 15 s"),
    ],
)
def test_one_rank_that_gives_up_early_or_late_or_says_nothing_fails_it(tmp_path, changes, reason):
    assert reason in measure(tmp_path, changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lost": (60, 72)}, "steps before the final loss that are not in the record with all ranks is 2, has to be"),
        ({"named": (3,)}, "ranks beyond the link that the record does not name is 1, has to be equal to 0"),
        ({"longest_merge_s": 0.01}, SHORT_LOSS),
    ],
)
def test_a_record_that_lacks_steps_or_names_or_shows_no_loss_fails_it(tmp_path, changes, reason):
    assert reason in measure(tmp_path, **changes)


def test_on_nodes_it_asks_for_the_commands_that_cut_their_link(tmp_path, monkeypatch):
    monkeypatch.delenv(GATE["CUT"], raising=False)
    trial = Trial(Path("gate.py"), tmp_path, is_rehearsal=False, num_ranks=1, num_nodes=2)
    with pytest.raises(NotRunError, match="RANKFOLD_GATE_CUT_COMMAND"):
        gate_named(NAME).run(trial)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "pair.cut_command, pair.mend_command",
            '"true", "true"',
            "ranks that did not give up after the final loss is 4",
        ),
        ("merge_s=12,", "merge_s=3,", "ranks that gave up in the short loss is 4"),
    ],
    ids=["nothing is cut", "a deadline below the short loss"],
)
def test_as_a_job_it_fails_where_nothing_is_cut_and_where_a_short_loss_is_final(tmp_path, old, new, reason):
    verdict, why = rehearsed(sabotaged(NAME, tmp_path, old, new), tmp_path)
    assert (verdict, reason in why) == ("failed", True), why
