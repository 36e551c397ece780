"""The gate of the storage finds a second winner, a writer that is not fenced, a lost step, a torn read and its lag."""

from dataclasses import replace

import pytest

from aggregator.catalogue import Catalogue
from aggregator.history import HistoryWriter
from aggregator.testing.packets import make_step
from launch.gates.known_run import Seen, commit_known, examine, known_packet
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.gates.sabotage import gate_named, rehearsed, sabotaged

GATE = gate_named("shared-file-system").run.__globals__


def record(path, packets):
    writer, catalogue = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR), Catalogue()
    for packet in packets:
        writer.commit(make_step(packet, catalogue))
    writer.close()
    return examine(path).problems


def changed(number, **changes):
    return replace(known_packet(number), **changes)


def test_a_record_of_known_steps_is_well_also_where_attempts_supersede_each_other(tmp_path):
    told = []
    commit_known(tmp_path, None, 20, told.append)
    commit_known(tmp_path, 15, 10, told.append)
    assert [step for step, _, _ in told] == [*range(20), *range(15, 25)]
    assert examine(tmp_path) == Seen(25, [])


@pytest.mark.parametrize(
    ("packets", "problem"),
    [
        ([known_packet(step) for step in (0, 1, 3)], "steps are not 0 to 2: 0, 1, 3"),
        ([known_packet(0), changed(0, step=1)], "max differs at steps 1"),
        ([known_packet(0), changed(1, ints=known_packet(1).ints * 2)], "total differs at steps 1"),
    ],
)
def test_a_step_that_is_missing_and_a_number_that_is_wrong_are_problems(tmp_path, packets, problem):
    assert any(problem in found for found in record(tmp_path, packets))


def test_the_lag_is_the_time_since_the_first_step_that_was_not_shown():
    told = [(step, 100.0 + step, 0.01) for step in range(10)]
    lag_s = GATE["lag_s"]
    assert lag_s((105.5, Seen(6, [])), told) == 0.0
    assert lag_s((105.5, Seen(4, [])), told) == pytest.approx(1.5)
    assert lag_s((120.0, Seen(10, [])), told) == 0.0


def test_a_record_that_cannot_be_read_is_a_problem(tmp_path):
    (problem,) = examine(tmp_path / "nothing").problems
    assert "HistoryNotFoundError" in problem


def test_a_writer_that_was_refused_where_it_had_to_go_on_is_no_success():
    with pytest.raises(RuntimeError, match="run_directory_in_use"):
        GATE["last_acknowledged"]([(1, 0.0, 0.0), "run_directory_in_use"])
    with pytest.raises(RuntimeError, match="nothing"):
        GATE["last_acknowledged"]([])


# A file system whose links replace what is there, as a server without exclusive creation would have it.
OVERWRITE = """
import os, shutil
os.link = lambda source, target: os.replace(shutil.copy2(source, f"{source}-copy"), target)
GATE = Gate("""


@pytest.mark.full
@pytest.mark.timeout(400)
def test_as_a_job_it_fails_on_storage_whose_links_overwrite(tmp_path):
    verdict, reason = rehearsed(sabotaged("shared-file-system", tmp_path, "GATE = Gate(", OVERWRITE), tmp_path)
    assert verdict == "failed"
    # How often an older writer goes on depends on whose file the sweep of its successor finds.
    assert "older writers that were not fenced by name is" in reason
    assert "records with a step or a number that is wrong is" in reason
