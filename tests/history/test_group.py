"""Steps that are committed together are acknowledged when they are durable, and not a moment before."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from aggregator.history import GroupCommit, HistoryWriter, open_history
from aggregator.testing.packets import make_packet, make_step
from telemetry.errors import HistoryWriteError, StepOrderError, WriterFencedError
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.history.history_processes import packet_of

SLOW = GroupCommit(max_steps=10, max_wait_s=3600.0, busy_share=0.0)


def create(path, group=SLOW, resume_step=None):
    return HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, resume_step, group=group)


def committed(path):
    return open_history(path).steps()["step"].to_pylist()


def test_a_group_is_one_file_and_is_acknowledged_as_a_whole(tmp_path):
    writer = create(tmp_path)
    told = [writer.append(make_step(packet_of(step))) for step in range(9)]
    assert not any(acknowledgement.done() for acknowledgement in told)
    assert committed(tmp_path) == []
    told.append(writer.append(make_step(packet_of(9))))
    assert all(acknowledgement.done() for acknowledgement in told)
    assert committed(tmp_path) == list(range(10))
    assert len(list((tmp_path / "seg-00000" / "c").iterdir())) == 1
    assert (writer.last_step, writer.num_commits) == (9, 10)


def test_a_step_does_not_wait_for_others_longer_than_it_is_told_to(tmp_path):
    writer = create(tmp_path, GroupCommit(max_steps=1000, max_wait_s=0.01, busy_share=0.0))
    writer.append(make_step(packet_of(1))).result(timeout=50)
    assert committed(tmp_path) == [1]


def test_a_step_that_comes_after_a_pause_does_not_wait(tmp_path):
    writer = create(tmp_path, GroupCommit(max_steps=1000, max_wait_s=3600.0))
    writer.append(make_step(packet_of(1))).result(timeout=50)
    time.sleep(20 * writer._commit_s)
    begun = time.monotonic()
    writer.append(make_step(packet_of(2))).result(timeout=50)
    assert time.monotonic() - begun < 50


def test_steps_are_taken_while_others_are_being_written_and_become_durable_in_order(tmp_path, monkeypatch):
    writer, go, told = create(tmp_path, GroupCommit(max_steps=1000)), threading.Event(), []
    link = os.link

    def slow(*paths):
        assert go.wait(50)
        link(*paths)

    monkeypatch.setattr(os, "link", slow)
    first = writer.append(make_step(packet_of(0)))
    while not writer._is_committing:
        time.sleep(0.001)
    others = [writer.append(make_step(packet_of(step))) for step in range(1, 50)]
    assert not first.done()
    for acknowledgement in (first, *others):
        acknowledgement.add_done_callback(lambda done: told.append(done.result().step))
    go.set()
    writer.close()
    assert told == list(range(50))
    assert committed(tmp_path) == list(range(50))
    assert len(list((tmp_path / "seg-00000" / "c").iterdir())) == 2


@pytest.mark.parametrize("end", ["commit", "flush", "close", "abandon", "settle"])
def test_whatever_ends_a_wait_waits_for_the_group_that_is_being_written(tmp_path, monkeypatch, end):
    writer, link = create(tmp_path, GroupCommit(max_steps=1000)), os.link

    def slow(*paths):
        time.sleep(0.1)
        link(*paths)

    monkeypatch.setattr(os, "link", slow)
    first = writer.append(make_step(packet_of(0)))
    while not writer._is_committing:
        time.sleep(0.001)
    arguments = {"commit": [make_step(packet_of(1))], "settle": [50.0]}.get(end, [])
    getattr(writer, end)(*arguments)
    assert first.done()
    assert committed(tmp_path)[0] == 0


def test_a_group_that_fails_while_others_are_taken_fails_them_too(tmp_path, monkeypatch):
    writer, go = create(tmp_path, GroupCommit(max_steps=1000)), threading.Event()

    def refused(*_):
        assert go.wait(50)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", refused)
    told = [writer.append(make_step(packet_of(0)))]
    while not writer._is_committing:
        time.sleep(0.001)
    told += [writer.append(make_step(packet_of(step))) for step in (1, 2)]
    go.set()
    assert all(isinstance(acknowledgement.exception(timeout=50), HistoryWriteError) for acknowledgement in told)
    with pytest.raises(HistoryWriteError):
        writer.append(make_step(packet_of(3)))
    writer.close()


@pytest.mark.parametrize(
    ("commit_s", "since_s", "wait_s"),
    [(0.0, float("inf"), 0.0), (0.01, 0.0, 0.03), (0.01, 0.02, 0.01), (0.01, 0.2, 0.0), (5.0, 1.0, 1.0)],
)
def test_commits_take_a_quarter_of_the_time_at_most(commit_s, since_s, wait_s):
    assert GroupCommit().wait_s(commit_s, since_s) == pytest.approx(wait_s)


def test_a_folding_thread_that_fails_for_good_does_not_leave_pending_steps_unanswered(tmp_path):
    writer = create(tmp_path)
    told = writer.append(make_step(packet_of(1)))
    writer._failure = WriterFencedError("the folding thread found the next generation taken")
    writer.close()
    assert told.exception() is writer._failure


def test_a_finding_is_durable_at_once_with_all_before_it(tmp_path):
    writer = create(tmp_path)
    writer.append(make_step(packet_of(1)))
    writer.append(make_step(make_packet(2, {}, findings=[{"code": "nan", "message": "NaN in layers.0"}])))
    assert committed(tmp_path) == [1, 2]


@pytest.mark.parametrize("end", ["commit", "flush", "close"])
def test_commit_flush_and_close_make_durable_what_waits(tmp_path, end):
    writer = create(tmp_path)
    told = writer.append(make_step(packet_of(1)))
    if end == "commit":
        writer.commit(make_step(packet_of(2)))
    else:
        getattr(writer, end)()
    assert told.done()
    assert committed(tmp_path)[0] == 1


def test_what_does_not_become_durable_is_never_acknowledged(tmp_path, monkeypatch):
    writer = create(tmp_path)
    told = writer.append(make_step(packet_of(1)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(HistoryWriteError, match="No space left"):
            writer.flush()
    assert isinstance(told.exception(), HistoryWriteError)
    assert committed(tmp_path) == []


def test_a_fenced_group_is_refused_as_a_whole(tmp_path):
    old = create(tmp_path)
    told = [old.append(make_step(packet_of(step))) for step in range(3)]
    create(tmp_path, resume_step=0)
    with pytest.raises(WriterFencedError):
        old.flush()
    assert all(isinstance(acknowledgement.exception(), WriterFencedError) for acknowledgement in told)


def test_steps_increase_within_a_group_too(tmp_path):
    writer = create(tmp_path)
    writer.append(make_step(packet_of(5)))
    with pytest.raises(StepOrderError):
        writer.append(make_step(packet_of(5)))


JOB = """
import signal, sys, time
from tests.history.history_processes import packet_of
from aggregator.history import GroupCommit, HistoryWriter
from aggregator.testing.packets import make_step
from telemetry.summary import DEFAULT_DESCRIPTOR
{before}
writer = HistoryWriter.create(sys.argv[1], {{}}, DEFAULT_DESCRIPTOR, group=GroupCommit(50, 3600.0, 0.0))
for step in range(57):
    writer.append(make_step(packet_of(step)))
print("ready", flush=True)
{after}
"""


def job(path, before="", after=""):
    source = JOB.format(before=textwrap.dedent(before), after=textwrap.dedent(after))
    return subprocess.Popen([sys.executable, "-c", source, str(path)], stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(100)
def test_sigterm_makes_pending_steps_durable_and_still_calls_the_handler_of_before(tmp_path):
    handler = """
    def handler(number, frame):
        print("earlier handler", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, handler)
    """
    process = job(tmp_path, handler, "time.sleep(80)")
    assert process.stdout.readline() == "ready\n"
    assert committed(tmp_path) == list(range(50))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 7
    assert process.stdout.read() == "earlier handler\n"
    assert committed(tmp_path) == list(range(57))


@pytest.mark.timeout(100)
def test_sigterm_without_a_handler_ends_the_process_as_ever(tmp_path):
    process = job(tmp_path, after="time.sleep(80)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM
    assert committed(tmp_path) == list(range(57))


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("after", "code"), [("", 0), ("raise RuntimeError('the loop broke')", 1)])
def test_an_interpreter_that_exits_leaves_nothing_pending(tmp_path, after, code):
    process = job(tmp_path, after=after)
    assert process.wait(timeout=60) == code
    assert committed(tmp_path) == list(range(57))


def test_a_signal_inside_of_a_commit_is_held_until_the_commit_is_whole(tmp_path, monkeypatch):
    from aggregator.history import termination

    writer, seen = create(tmp_path), []
    monkeypatch.setattr(termination, "_earlier", lambda number, frame: seen.append(committed(tmp_path)))
    link = os.link

    def signalled(*paths):
        monkeypatch.setattr(os, "link", link)
        termination._on_sigterm(signal.SIGTERM, None)
        assert seen == []
        link(*paths)

    monkeypatch.setattr(os, "link", signalled)
    writer.commit(make_step(packet_of(1)))
    assert seen == [[1]]


def test_a_process_that_commits_each_step_keeps_its_handler_of_sigterm(tmp_path):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        create(tmp_path).commit(make_step(packet_of(1)))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_delay_of_the_timer_is_what_is_measured(tmp_path):
    writer = create(tmp_path, GroupCommit(max_steps=1000, max_wait_s=0.05, busy_share=0.0))
    begun = time.monotonic()
    writer.append(make_step(packet_of(1))).result(timeout=50)
    assert time.monotonic() - begun >= 0.05
