"""A reader beside a writer sees whole steps, in order, never fewer than before."""

import time

import pytest

from aggregator.history import open_history
from tests.history.history_processes import CONTEXT, commit_and_tell
from tests.history.test_crash import assert_exact

NUM_STEPS = 100


def newest_told(receive):
    """The newest step that the writer has told, -1 if it told none since the last look."""
    newest = -1
    while receive.poll():
        try:
            told = receive.recv()
        except EOFError:
            break
        newest = NUM_STEPS - 1 if told is None else told
    return newest


@pytest.mark.timeout(60)
def test_a_reader_follows_a_writer_through_its_merges(tmp_path):
    receive, send = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=commit_and_tell, args=(tmp_path, 0, NUM_STEPS - 1, None, send), daemon=True)
    process.start()
    send.close()
    assert receive.poll(50)
    history, seen, looks = open_history(tmp_path), 1, 0
    deadline = time.monotonic() + 50
    while seen < NUM_STEPS and time.monotonic() < deadline:
        acknowledged = newest_told(receive)
        steps = history.steps()["step"].to_pylist()
        assert steps == list(range(len(steps)))
        assert len(steps) >= max(seen, acknowledged + 1)
        seen, looks = len(steps), looks + 1
    process.join(10)
    assert looks > 3
    assert_exact(history, list(range(NUM_STEPS)))
