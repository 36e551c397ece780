"""A script under torchrun on this machine, run by path, and the first error of its ranks."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.process import run_supervised

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
    return run_job(_command(script, arguments, num_ranks))


def run_job(command: Sequence[str]) -> JobOutcome:
    """Run the program that starts the ranks and wait for its end.

    Standard error is held back until the end: where a rank raised a Rankfold error, that error says it all, and the
    traceback of every rank and of torchrun says nothing more. Otherwise it is passed on whole.
    """
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        error_file, stderr_file = Path(folder, "error.json"), Path(folder, "stderr")
        with stderr_file.open("wb") as stderr:
            exit_code = run_supervised(command, env=_environment(error_file), stderr=stderr)
        refusal = _refusal(error_file) if exit_code else ""
        if not refusal and exit_code < 128:
            sys.stderr.write(stderr_file.read_text(errors="replace"))
    return JobOutcome(exit_code, refusal)


def _command(script: Path, arguments: Sequence[str], num_ranks: int) -> list[str]:
    # A local address, because the name of a laptop or container often does not resolve.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    return [*torchrun, "--nnodes", "1", "--nproc-per-node", str(num_ranks), str(script), *arguments]


def _environment(error_file: Path) -> dict[str, str]:
    """One thread a rank unless the user says otherwise: ranks share the cores, and torchrun would warn."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)}


def _refusal(error_file: Path) -> str:
    """Read what torchrun copied from the first rank that failed under its ``@record``."""
    try:
        message = json.loads(error_file.read_text())["message"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    found = re.fullmatch(r"\w+: (\[\w+\] .*)", message, flags=re.DOTALL)
    return found[1] if found else ""
