"""The demo: train a small GPT on several ranks, then show what its record says."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from aggregator import open_history
from aggregator.ray_actor.library import load_ray
from launch.run_report import print_run_report
from launch.torchrun import JobOutcome, run_job, run_script
from telemetry.errors import HistoryNotFoundError, RunDirectoryInUseError

__all__ = ["DemoOptions", "run_demo"]

SCRIPT: Final = Path(__file__).parent / "demo" / "train.py"
RAY_SCRIPT: Final = SCRIPT.with_name("train_ray.py")


@dataclass(frozen=True)
class DemoOptions:
    """What ``rankfold demo`` takes; steps count from 1."""

    num_ranks: int
    num_steps: int
    every: int
    hist_every: int
    out: Path
    seed: int
    under_ray: bool = False

    def script_arguments(self) -> list[str]:
        """Return the command line of the training script."""
        values = {
            "--out": self.out,
            "--steps": self.num_steps,
            "--every": self.every,
            "--hist-every": self.hist_every,
            "--seed": self.seed,
        }
        return [word for name, value in values.items() for word in (name, str(value))]


def run_demo(options: DemoOptions, console: Console) -> JobOutcome:
    """Run the demo to its end and print the report.

    Raises:
        RunDirectoryInUseError: ``options.out`` holds a run.
        AggregatorUnavailableError: Ray was asked for and is not installed.
    """
    _require_no_run(options.out)
    if options.under_ray:
        load_ray()
        workers = ["--workers", str(options.num_ranks)]
        command = [sys.executable, str(RAY_SCRIPT), *options.script_arguments(), *workers]
        outcome = run_job(command, env={"OMP_NUM_THREADS": "1", **os.environ})
    else:
        outcome = run_script(SCRIPT, options.script_arguments(), num_ranks=options.num_ranks)
    if outcome.exit_code == 0:
        print_run_report(open_history(options.out), options.out, console)
    return outcome


def _require_no_run(out: Path) -> None:
    """Refuse here what every rank would refuse at attach, seconds earlier."""
    try:
        open_history(out)
    except HistoryNotFoundError:
        return
    raise RunDirectoryInUseError(
        f"{out} already holds a run", remedy="name another directory with --out, or move that one away"
    )
