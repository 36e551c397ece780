"""A reader beside a writer sees whole steps, in order, never fewer than before, and soon."""

import statistics
import time

import pytest

from aggregator.history import open_history
from tests.history.history_processes import CONTEXT, append_and_tell, commit_and_tell
from tests.history.test_crash import assert_exact

NUM_STEPS = 100
SITE = ("layers.1", "activation", "max")


def newest_told(receive, newest):
    """The newest step that the writer has told."""
    while receive.poll():
        try:
            told = receive.recv()
        except EOFError:
            break
        newest = NUM_STEPS - 1 if told is None else told
    return newest


@pytest.mark.timeout(60)
def test_a_reader_follows_a_writer_through_its_folding(tmp_path):
    receive, send = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=commit_and_tell, args=(tmp_path, 0, NUM_STEPS - 1, None, send), daemon=True)
    process.start()
    send.close()
    assert receive.poll(50)
    history, seen, looks, acknowledged = open_history(tmp_path), 1, 0, -1
    deadline = time.monotonic() + 50
    while seen < NUM_STEPS and time.monotonic() < deadline:
        acknowledged = newest_told(receive, acknowledged)
        steps = history.steps()["step"].to_pylist()
        assert steps == list(range(len(steps)))
        assert len(steps) >= max(seen, acknowledged + 1)
        seen, looks = len(steps), looks + 1
    process.join(10)
    assert looks > 3
    assert_exact(history, list(range(NUM_STEPS)))


def look(history, kind):
    """Read in one of several ways, and return the newest step that it shows."""
    if kind == 0:
        steps = history.steps()["step"].to_pylist()
    elif kind == 1:
        series = history.series(*SITE)
        steps = series["step"].to_pylist()
        assert series["value"].to_pylist() == [max(float(step), 0.5) for step in steps]
    else:
        steps = history.observations("layers.0", columns=["step"])["step"].to_pylist()
    assert steps == list(range(len(steps)))
    return len(steps) - 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_reads", "fan_in"), [(150, (3, 2)), pytest.param(2000, (8, 8), marks=pytest.mark.full)])
def test_no_read_fails_while_steps_are_written_and_folded_and_each_is_visible_soon(tmp_path, num_reads, fan_in):
    receive, send = CONTEXT.Pipe(duplex=False)
    stop = CONTEXT.Event()
    process = CONTEXT.Process(target=append_and_tell, args=(tmp_path, fan_in, send, stop), daemon=True)
    process.start()
    send.close()
    appended, delays, shown = {}, [], -1
    assert receive.poll(50)
    history, deadline = open_history(tmp_path), time.monotonic() + 50
    while history.steps().num_rows == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    num_done = 0
    while num_done < num_reads or (shown < 40 and time.monotonic() < deadline):
        newest, num_done = look(history, num_done % 3), num_done + 1
        now = time.monotonic()
        while receive.poll():
            step, at = receive.recv()
            appended[step] = at
        delays += [now - appended[step] for step in range(shown + 1, newest + 1) if step in appended]
        shown = max(shown, newest)
    stop.set()
    process.join(30)
    delay_s = statistics.median(delays)
    print(f"\n{num_done} reads of {shown + 1} steps, visible {1e3 * delay_s:.0f} ms after append (median)")
    assert process.exitcode == 0
    assert shown >= 40
    assert len(list((tmp_path / "seg-00000" / "c").glob("L2-*.parquet"))) > 0
