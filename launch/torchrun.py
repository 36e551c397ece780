"""A script under torchrun on this machine, run by path, and the first error of its ranks."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.job import plan_job
from launch.process import GRACE_S, run_supervised

__all__ = ["JobOutcome", "run_job", "run_script"]


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Attributes:
        exit_code: of torchrun; 128 plus the signal's number if a signal ended it.
        refusal: text of the Rankfold error that the first failing rank raised, "" if there was none.
    """

    exit_code: int
    refusal: str = ""


def run_script(script: Path, arguments: Sequence[str], *, num_ranks: int) -> JobOutcome:
    """Run ``script`` on ``num_ranks`` local ranks and wait for its end; see :func:`run_job`."""
    # One thread a rank unless the user says otherwise: so few ranks of so small a model are faster that way.
    num_threads = None if os.environ.get("OMP_NUM_THREADS") else 1
    job = plan_job(["--nproc-per-node", str(num_ranks)], [str(script), *arguments], num_threads=num_threads)
    return run_job(job.command, env=job.environment())


def run_job(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
    is_live: bool = False,
) -> JobOutcome:
    """Run the program that starts the ranks and wait for its end.

    Where a rank raised a Rankfold error, that error says it all, and the traceback of every rank and of torchrun says
    nothing more. So standard error is held back until it is known which of the two there is to show.

    Args:
        command: the program and its arguments.
        env: its environment; that of this process if None.
        grace_s: see :func:`launch.process.run_supervised`.
        is_live: pass standard error on as it comes; for scripts that are not ours, and may show progress there.
    """
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        error_file, stderr_file = Path(folder, "error.json"), Path(folder, "stderr")
        environment = {**(os.environ if env is None else env), "TORCHELASTIC_ERROR_FILE": str(error_file)}
        if is_live:
            exit_code = run_supervised(command, env=environment, grace_s=grace_s)
            return JobOutcome(exit_code, _refusal(error_file) if exit_code else "")
        with stderr_file.open("wb") as stderr:
            exit_code = run_supervised(command, env=environment, stderr=stderr, grace_s=grace_s)
        refusal = _refusal(error_file) if exit_code else ""
        if not refusal and exit_code < 128:
            sys.stderr.write(stderr_file.read_text(errors="replace"))
    return JobOutcome(exit_code, refusal)


def _refusal(error_file: Path) -> str:
    """Read what torchrun copied from the first rank that failed under its ``@record``."""
    try:
        message = json.loads(error_file.read_text())["message"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    found = re.fullmatch(r"\w+: (\[\w+\] .*)", message, flags=re.DOTALL)
    return found[1] if found else ""
