"""A job that its launcher restarts goes on in its own directory, and in nobody else's."""

import pytest

from aggregator.history import HistoryWriter, open_history
from aggregator.testing.packets import make_step
from telemetry.errors import RunDirectoryInUseError
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.history.history_processes import packet_of


@pytest.fixture
def launched(monkeypatch):
    """Set what a launcher tells its workers."""

    def set_environment(**variables):
        names = ["SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
        names += ["RANKFOLD_JOB", "RANKFOLD_ATTEMPT", "RANKFOLD_NONCE"]
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_environment


def attempt(path, *steps, resume_step=None):
    writer = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, resume_step)
    for step in steps:
        writer.commit(make_step(packet_of(step)))
    writer.abandon()
    return writer


FIRST = {"TORCHELASTIC_RUN_ID": "exp", "TORCHELASTIC_RESTART_COUNT": "0"}
SECOND = {"TORCHELASTIC_RUN_ID": "exp", "TORCHELASTIC_RESTART_COUNT": "1"}
AGREED = {"RANKFOLD_JOB": "exp", "RANKFOLD_ATTEMPT": "1", "RANKFOLD_NONCE": "aa"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, SECOND),
        ({**FIRST, "TORCHELASTIC_RUN_ID": "none"}, {**SECOND, "TORCHELASTIC_RUN_ID": "none"}),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}),
        ({"SLURM_JOB_ID": "7", **SECOND}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", **FIRST}),
        ({**AGREED, **SECOND}, {**AGREED, "RANKFOLD_ATTEMPT": "2", **FIRST}),
        ({**AGREED, "SLURM_JOB_ID": "7"}, {**AGREED, "SLURM_JOB_ID": "8", "RANKFOLD_ATTEMPT": "2"}),
    ],
    ids=[
        "torchrun",
        "torchrun without an id",
        "requeued",
        "torchrun within a requeued job",
        "on a node whose agent has restarted less",
        "in another allocation",
    ],
)
def test_a_restart_before_the_first_checkpoint_begins_its_own_run_anew(tmp_path, launched, first, second):
    launched(**first)
    attempt(tmp_path, 1, 2, 3)
    launched(**second)
    assert attempt(tmp_path, 1, 2).resume_step == 0
    rows = open_history(tmp_path).steps().select(["step", "segment"]).to_pydict()
    assert rows == {"step": [1, 2], "segment": [1, 1]}


def test_three_legs_of_a_job_that_resumes_from_its_checkpoints_are_one_run(tmp_path, launched):
    launched(**FIRST)
    attempt(tmp_path, 1, 2, 3, 4)
    for count, start in ((1, 4), (2, 7)):
        launched(TORCHELASTIC_RUN_ID="exp", TORCHELASTIC_RESTART_COUNT=str(count))
        attempt(tmp_path, *range(start, start + 3), resume_step=start)
    assert open_history(tmp_path).steps()["step"].to_pylist() == list(range(1, 10))


@pytest.mark.parametrize(
    "other",
    [FIRST, {**SECOND, "TORCHELASTIC_RUN_ID": "another"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "3"}, {}],
    ids=["the same attempt", "another run", "another job", "no launcher"],
)
def test_nobody_else_may_begin_in_a_used_directory(tmp_path, launched, other):
    launched(**FIRST)
    attempt(tmp_path, 1)
    launched(**other)
    with pytest.raises(RunDirectoryInUseError):
        attempt(tmp_path, 1)
