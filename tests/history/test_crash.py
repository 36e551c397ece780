"""A writer that dies anywhere leaves the record as it was after its last commit, and a successor can go on."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from aggregator.history import FoldingPolicy, HistoryWriter, open_history, verify
from aggregator.history import publish as publish_module
from aggregator.history.snapshot import newest_index
from aggregator.testing.packets import make_step
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.history.history_processes import CONTEXT, commit_and_tell, packet_of

DEADLINE_S = 50.0


def assert_exact(history, steps):
    """The record holds these steps, once each, with the numbers of ``packet_of``."""
    assert history.steps()["step"].to_pylist() == steps
    rows = history.observations("layers.0", columns=["step", "total", "max", "sum"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [(step, 3, max(step, 0.5), step - 0.5) for step in steps]


def start(path, first, last, resume_step):
    receive, send = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=commit_and_tell, args=(path, first, last, resume_step, send), daemon=True)
    process.start()
    send.close()
    return process, receive


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_kills", [5, pytest.param(100, marks=pytest.mark.full)])
def test_a_writer_killed_at_random_loses_nothing_that_it_acknowledged_and_its_successor_goes_on(tmp_path, num_kills):
    chance = random.Random(11)
    next_step = 0
    for attempt in range(num_kills):
        process, told = start(tmp_path, next_step, next_step + 10_000, next_step if attempt else None)
        acknowledged = next_step - 1
        for _ in range(chance.randrange(1, 12)):
            assert told.poll(DEADLINE_S)
            acknowledged = told.recv()
        time.sleep(chance.random() * 0.012)  # Where in the commit the signal falls is what is random here.
        os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE_S)
        assert process.exitcode == -signal.SIGKILL
        while told.poll():
            try:
                acknowledged = told.recv()
            except EOFError:
                break
        steps = open_history(tmp_path).steps()["step"].to_pylist()
        assert steps[-1] >= acknowledged
        next_step = steps[-1] + 1
    assert_exact(open_history(tmp_path), list(range(next_step)))
    assert verify(tmp_path).num_rows == 0


NO_FOLDING = FoldingPolicy(fan_in=(10**6, 10**6))
FOLDED_TWICE = FoldingPolicy(fan_in=(2, 2))


class Killed(BaseException):
    """Stands for the end of the process."""


class Death:
    """Ends the process at its n-th system call: all later ones have no effect, a write half of its own."""

    CALLS = ("open", "write", "fsync", "link", "rename", "mkdir", "rmdir")

    def __init__(self, monkeypatch, at_call):
        self.count, self.at_call = 0, at_call
        for name in self.CALLS:
            monkeypatch.setattr(publish_module.os, name, self.wrapped(name, getattr(os, name)))
        unlink = Path.unlink
        monkeypatch.setattr(
            Path, "unlink", lambda path, missing_ok=False: self.call("unlink", unlink, path, missing_ok)
        )

    def wrapped(self, name, function):
        return lambda *args, **kwargs: self.call(name, function, *args, **kwargs)

    def call(self, name, function, *args, **kwargs):
        self.count += 1
        if self.count == self.at_call and name == "write":
            function(args[0], bytes(args[1])[: len(args[1]) // 2])
        if self.count >= self.at_call:
            raise Killed
        return function(*args, **kwargs)


def commit_and_fold(writer, step):
    writer.commit(make_step(packet_of(step)))
    assert writer.wait_folded(DEADLINE_S)


def writer_with(path, num_steps, folding=NO_FOLDING):
    writer = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, folding=folding)
    for step in range(num_steps):
        commit_and_fold(writer, step)
    return writer


def leftovers(segment):
    """Return the files of a segment that no one will ever read, but for the claims."""
    newest = {path.name for path in sorted(segment.glob("index-*.arrow"))[-2:]}
    kept = {entry.file for entry in newest_index(segment).entries} | newest | {"segment.json"}
    there = {str(path.relative_to(segment)) for path in segment.rglob("*") if path.is_file()}
    return there - kept


def calls_of_one_commit(path, monkeypatch, num_before, folding):
    writer = writer_with(path, num_before, folding)
    with monkeypatch.context() as patch:
        death = Death(patch, at_call=10**9)
        commit_and_fold(writer, num_before)
    return death.count


# With FOLDED_TWICE the second commit folds to level 1, and the fourth to level 1 and then to level 2.
@pytest.mark.parametrize(
    ("num_before", "folding", "least_calls"), [(0, NO_FOLDING, 16), (3, NO_FOLDING, 16), (3, FOLDED_TWICE, 60)]
)
def test_death_at_any_system_call_of_a_commit_leaves_the_step_whole_or_absent(
    tmp_path, monkeypatch, file_system, num_before, folding, least_calls
):
    num_calls = calls_of_one_commit(tmp_path / "counted", monkeypatch, num_before, folding)
    assert num_calls >= least_calls
    outcomes = set()
    for at_call in range(1, num_calls + 1):
        run = tmp_path / str(at_call)
        writer = writer_with(run, num_before, folding)
        with monkeypatch.context() as patch:
            Death(patch, at_call)
            with contextlib.suppress(Killed):
                commit_and_fold(writer, num_before)
            writer.abandon()
        steps = open_history(run).steps()["step"].to_pylist()
        assert steps in (list(range(num_before)), list(range(num_before + 1)))
        outcomes.add(len(steps))
        successor = HistoryWriter.create(run, {}, DEFAULT_DESCRIPTOR, num_before)
        commit_and_fold(successor, num_before)
        assert_exact(open_history(run), list(range(num_before + 1)))
        assert verify(run).num_rows == 0
        # What the dead writer left is gone from its segment, and its successor leaves nothing.
        assert leftovers(run / "seg-00000") == set()
        successor.close()
        assert leftovers(run / "seg-00001") == set()
        assert not list(run.glob(".unpublished-*"))
    assert outcomes == {num_before, num_before + 1}


def test_bytes_are_synced_before_they_get_their_name_and_the_name_before_it_is_built_upon(tmp_path, monkeypatch):
    writer = writer_with(tmp_path, 3)
    calls, real = [], {name: getattr(os, name) for name in ("open", "fsync", "link")}
    for name in real:

        def noted(*args, name=name, function=real[name], **kwargs):
            calls.append((name, str(args[-1]).rpartition("/")[2] if name == "link" else ""))
            return function(*args, **kwargs)

        monkeypatch.setattr(publish_module.os, name, noted)
    writer.commit(make_step(packet_of(3)))

    def published(name):
        return [("open", ""), ("open", ""), ("fsync", ""), ("link", name), ("open", ""), ("fsync", "")]

    assert calls == [*published("00000003.arrow"), *published("index-00000003.arrow")]
