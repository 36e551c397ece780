"""A script under torchrun: how its end and its errors reach the caller."""

from pathlib import Path

import pytest

from launch.torchrun import run_script

pytestmark = pytest.mark.timeout(180)

PREAMBLE = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record
import telemetry.errors
"""


def write(folder: Path, body: str) -> Path:
    script = folder / "script.py"
    script.write_text(PREAMBLE + body)
    return script


def test_every_rank_runs_the_script_with_its_arguments(tmp_path):
    body = "from pathlib import Path; Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['OMP_NUM_THREADS'])"
    assert run_script(write(tmp_path, body), [str(tmp_path)], num_ranks=2).exit_code == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["1", "1"]


def test_a_refusal_on_all_ranks_reaches_the_caller_once_and_without_tracebacks(tmp_path, capfd):
    body = """
@record
def main():
    raise telemetry.errors.RunDirectoryInUseError("runs/x already holds a run", remedy="name another")
main()
"""
    outcome = run_script(write(tmp_path, body), [], num_ranks=2)
    assert outcome.exit_code == 1
    assert outcome.refusal == "[run_directory_in_use] runs/x already holds a run\n  → name another"
    assert capfd.readouterr().err == ""


def test_an_error_that_is_not_ours_is_passed_on_whole(tmp_path, capfd):
    outcome = run_script(write(tmp_path, "raise KeyError('not ours')"), [], num_ranks=1)
    assert outcome.exit_code == 1
    assert outcome.refusal == ""
    assert "KeyError: 'not ours'" in capfd.readouterr().err
