"""``rankfold run``: the user's own script under torchrun."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from launch.job import plan_job
from launch.lazy import words_after_dashes
from launch.process import GRACE_S
from launch.refusals import print_refusal
from launch.torchrun import run_job

__all__ = ["run"]

# For torchrun to end once its ranks are gone; after that it is killed, too.
MARGIN_S: Final = 5.0


def run(
    context: typer.Context,
    to: Annotated[
        str, typer.Option(envvar="RANKFOLD_TO", help="Destination of the record, where the script names none.")
    ] = "",
    job: Annotated[
        str,
        typer.Option(help="Name of this job, unique and the same over all its restarts; Slurm's job id by default."),
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="OMP_NUM_THREADS of each rank; the cores shared by the ranks by default.")
    ] = None,
    grace_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds that ranks have after SIGTERM or Ctrl-C before they are killed.")
    ] = GRACE_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print environment and command, start nothing.")] = False,
) -> None:
    """Start a script on all ranks of this node, under torchrun: rankfold run [OPTIONS] -- train.py ARGS

    Options that are not listed here go to torchrun as they are: --nnodes, --nproc-per-node, --rdzv-endpoint,
    --max-restarts, -m and all others. On several nodes start the same command on each, with the same --rdzv-endpoint.
    """
    planned = plan_job(context.args, words_after_dashes(context), to=to, job=job, num_threads=threads, grace_s=grace_s)
    if dry_run:
        typer.echo(str(planned))
        return
    outcome = run_job(planned.command, env=planned.environment(), grace_s=grace_s + MARGIN_S, is_live=True)
    if outcome.refusal:
        print_refusal(outcome.refusal)
    raise typer.Exit(outcome.exit_code)
