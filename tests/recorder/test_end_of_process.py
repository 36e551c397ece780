"""A job that is told to end, or ends, leaves in its record every step that was merged."""

import signal
import subprocess
import sys

import pytest

from aggregator import open_history

JOB = """
import sys, time
from aggregator.collective import CollectiveAggregator
from aggregator.history import GroupCommit
from aggregator.recorder import Recorder
from aggregator.testing import make_packet
from tests.collective.worlds import offer, wait_until
aggregator = CollectiveAggregator(lambda: Recorder(GroupCommit(1000, 3600.0, 0.0)))
aggregator.attach(offer(0, 1, to=sys.argv[1]))
for step in range(57):
    aggregator.submit(make_packet(step, {{}}))
    wait_until(lambda: aggregator._coordinator.num_settled == step + 1)
print("ready", flush=True)
{after}
"""


def job(path, after):
    return subprocess.Popen(
        [sys.executable, "-c", JOB.format(after=after), str(path)], stdout=subprocess.PIPE, text=True
    )


def committed(path):
    return open_history(path).steps()["step"].to_pylist()


@pytest.mark.timeout(100)
def test_sigterm_makes_durable_what_was_merged_and_ends_the_process_as_ever(tmp_path):
    process = job(tmp_path / "run", "time.sleep(80)")
    assert process.stdout.readline() == "ready\n"
    assert committed(tmp_path / "run") == []
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM
    assert committed(tmp_path / "run") == list(range(57))


@pytest.mark.timeout(100)
def test_a_process_that_exits_without_a_close_leaves_what_was_merged(tmp_path):
    process = job(tmp_path / "run", "raise RuntimeError('the loop broke')")
    assert process.wait(timeout=60) == 1
    assert committed(tmp_path / "run") == list(range(57))
