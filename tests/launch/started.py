"""Jobs that tests start with ``rankfold run``, each in a process of its own with a deadline."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RANKFOLD = str(Path(sys.executable).with_name("rankfold"))
SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
DEADLINE_S = 150.0


def command(out: Path, *script: str, to: Path | None = None, options: Sequence[str] = ()) -> list[str]:
    """Return the command line of a job of two ranks that records into ``out/run`` and says what it did in ``out``."""
    # A link that is cut can leave torchrun deaf: whatever else fails, this ends.
    guard = ["timeout", "-k", "5", str(DEADLINE_S)]
    run = [RANKFOLD, "run", "--to", str(to or out / "run"), "--nproc-per-node", "2", *options]
    return [*guard, *run, "--", SCRIPT, "--out", str(out), *script]


def start(words: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a job; ``timeout`` passes the signals on that it gets."""
    return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a job and of all that holds its pipes; return exit code, output and errors."""
    output, errors = job.communicate(timeout=DEADLINE_S + 10)
    return job.returncode, output, errors


def step_of(out: Path, rank: int) -> int:
    """Return the last step that a rank has finished, 0 before the first."""
    try:
        return int((out / f"at-{rank}").read_text() or 0)
    except FileNotFoundError:
        return 0


def wait_until(is_true: Callable[[], bool], what: str, job: subprocess.Popen[str]) -> None:
    """Wait for something that a running job does."""
    ends = time.monotonic() + DEADLINE_S
    while not is_true():
        assert job.poll() is None, f"the job ended before {what}: {job.communicate()[1][-2000:]}"
        assert time.monotonic() < ends, f"no {what} within {DEADLINE_S} s"
        time.sleep(0.05)


def told(out: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Return (attempt, rank) → what the rank was started with; the attempt is -1 where nobody numbers them."""
    found = {}
    for file in sorted(out.glob("told-*.json")):
        attempt, _, rank = file.stem.removeprefix("told-").rpartition("-")
        found[int(attempt), int(rank)] = json.loads(file.read_text())
    return found
