"""One child process, supervised: signals go on to it, its end has a deadline, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

__all__ = ["ENDING_SIGNALS", "EXIT_LATE", "GRACE_S", "handled_signals", "run_supervised"]

# As timeout(1) says it.
EXIT_LATE: Final = 124
GRACE_S: Final = 30.0
ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S: Final = 0.1


def run_supervised(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    grace_s: float = GRACE_S,
    limit_s: float = float("inf"),
) -> int:
    """Run a command to its end; call from the main thread.

    SIGINT, SIGTERM and SIGHUP go on to the child, which then has ``grace_s`` seconds to end. After that, at a second
    signal, or after ``limit_s`` seconds altogether, the child and all its descendants are killed.

    Args:
        command: program and arguments.
        env: the whole environment of the child.
        stdout, stderr: where its output goes; where ours goes if None.
        grace_s: seconds between a signal and the kill.
        limit_s: seconds that the child may run.

    Returns:
        The exit code of the child; 128 plus the number of the signal that ended the run, as shells count; or
        ``EXIT_LATE`` after ``limit_s``.
    """
    received: list[int] = []
    with handled_signals(lambda got, _frame: received.append(got)):
        # Its own session, so that Ctrl-C on a terminal reaches the child once, through us.
        child = subprocess.Popen(command, env=dict(env), stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            code = _wait(child, received, grace_s, time.monotonic() + limit_s)
        finally:
            if child.poll() is None:
                _kill_tree(child)
    if received:
        return 128 + received[0]
    return 128 - code if code < 0 else code


def _wait(child: subprocess.Popen[bytes], received: list[int], grace_s: float, last: float) -> int:
    num_forwarded, deadline = 0, float("inf")
    while True:
        try:
            return child.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > last:
            _kill_tree(child)
            return EXIT_LATE
        if len(received) > 1 or time.monotonic() > deadline:
            _kill_tree(child)
            return child.wait()
        if received and not num_forwarded:
            child.send_signal(received[0])
            num_forwarded, deadline = 1, time.monotonic() + grace_s


@contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have ``ENDING_SIGNALS`` handled for a while; call from the main thread.

    What is ignored stays so, here and in children: that is how nohup keeps a job when its terminal goes.
    """
    heard = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    earlier = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)


def _kill_tree(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its descendants, found before it dies: torchrun gives each worker a session of its own."""
    pids = (child.pid, *_descendants(child.pid))
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    child.wait()


def _descendants(pid: int) -> list[int]:
    parents = _parents()
    found, queue = [], [pid]
    while queue:
        above = queue.pop()
        below = [one for one, parent in parents.items() if parent == above]
        found += below
        queue += below
    return found


def _parents() -> dict[int, int]:
    """Return pid → parent pid of every process, from /proc where there is one, else from ``ps`` (macOS)."""
    if Path("/proc/self/stat").exists():
        pairs = [_parent_from_proc(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return dict(pair for pair in pairs if pair is not None)
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True, timeout=10)
    return {int(pid): int(parent) for pid, parent in (line.split() for line in listing.stdout.splitlines())}


def _parent_from_proc(entry: Path) -> tuple[int, int] | None:
    try:
        # The command, in parentheses, may itself hold spaces and parentheses; the parent is the second field after it.
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(entry.name), int(fields[1])
