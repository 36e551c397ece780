"""The command line: ``rankfold``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from launch.lazy import LazyGroup
from launch.refusals import print_refusal

if TYPE_CHECKING:
    from launch.doctor import Installation

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="rankfold",
    cls=LazyGroup,
    help="One exact, rank-merged record of a distributed training run.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rankfold {version('rankfold')}")
        raise typer.Exit


@app.callback()
def _rankfold(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One exact, rank-merged record of a distributed training run."""


@app.command("demo")
def _demo(
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start on this machine.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    every: Annotated[int, typer.Option(min=1, help="Steps between records.")] = 5,
    hist_every: Annotated[int, typer.Option(min=1, help="Steps between records with histograms.")] = 20,
    out: Annotated[Path, typer.Option(help="Run directory, new or empty.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the initial weights and of the batches.")] = 0,
    under_ray: Annotated[bool, typer.Option("--ray", help="Run under Ray Train, with the record in an actor.")] = False,
) -> None:
    """Train a small byte-level GPT under torchrun, or Ray Train, and show what its record says."""
    from launch.demo_job import DemoOptions, run_demo

    options = DemoOptions(ranks, steps, every, hist_every, out, seed, under_ray)
    outcome = run_demo(options, Console())
    if outcome.refusal:
        print_refusal(outcome.refusal)
    elif outcome.exit_code > 128:
        typer.echo(f"stopped by a signal; what was committed until then is in {out}", err=True)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


@app.command("doctor")
def _doctor(
    run: Annotated[Path | None, typer.Option(help="Run directory whose storage to try.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of the training script, this one by default.")] = None,
    layout: Annotated[str | None, typer.Option(help="Axes of the job, outermost first: pp=2,dp=2,tp=2.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, envvar="WORLD_SIZE", help="Ranks of the job.")] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Compare this many nodes, with a doctor started on each.")] = 1,
    node_rank: Annotated[
        int, typer.Option(min=0, envvar=["SLURM_NODEID", "JOB_COMPLETION_INDEX"], help="Which of them this one is.")
    ] = 0,
    rdzv_endpoint: Annotated[str, typer.Option(help="HOST:PORT where they meet, HOST being node 0.")] = "",
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for other nodes.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Say what this installation has, and what would keep a job from its record; exits 3 where something would."""
    from launch.checks import parse_sizes
    from launch.commands.shared import EXIT_FOUND
    from launch.doctor import inspect_installation
    from launch.nodes import Meeting

    sizes = parse_sizes(layout) if layout is not None else None
    meeting = Meeting(node_rank, nnodes, rdzv_endpoint, timeout_s) if nnodes > 1 else None
    found = inspect_installation(folder, run, sizes, world_size, meeting)
    if as_json:
        typer.echo(json.dumps(found.to_wire()))
    else:
        _print_installation(found)
    if not found.is_sound:
        raise typer.Exit(EXIT_FOUND)


def _print_installation(found: Installation) -> None:
    typer.echo(f"{'python':<13} {found.python}")
    for name, installed in found.packages.items():
        typer.echo(f"{name:<13} {installed or 'not installed'}")
    typer.echo(f"imported from {found.location}")
    typer.echo(f"tensors on the CPU are reduced by {found.backend} (available: {', '.join(found.backends)})")
    for device in found.devices:
        typer.echo(f"tensors on {device} are reduced by aten")
    typer.echo(f"collectives: {_collectives(found) or 'none, this torch has no torch.distributed'}")
    for check in found.checks:
        typer.echo(f"{check.state:<8} {check.name}: {check.found}")
        if check.remedy:
            typer.echo(f"         → {check.remedy}")
    for sentence in found.advice:
        typer.echo(f"→ {sentence}")


def _collectives(found: Installation) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.collectives.items())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; a Rankfold error is printed without a traceback.

    Args:
        arguments: the words after ``rankfold``; those of this process if None.
    """
    try:
        app(None if arguments is None else list(arguments))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:
        if not _is_refusal(error):
            raise
        print_refusal(str(error))
        return 1
    return 0


def _is_refusal(error: Exception) -> bool:
    # Not imported for this alone: whoever raised one of these errors has imported them, and torch with them.
    errors = sys.modules.get("telemetry.errors")
    return errors is not None and isinstance(error, errors.RankfoldError)


def main() -> None:
    """Run the command line of this process, and end it with the exit code of the command."""
    sys.exit(run())
