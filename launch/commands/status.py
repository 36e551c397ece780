"""``rankfold status``: how the actors of a run under Ray are."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from aggregator.ray_actor.query import read_status
from aggregator.ray_actor.status import ActorStatus
from launch.commands.shared import JsonOption, console, print_json

__all__ = ["status"]


def status(
    to: Annotated[str, typer.Argument(help="Destination of the run, ray://NAME.")],
    as_json: JsonOption = False,
) -> None:
    """Say how the actors of a run are: health, lag, coverage. Exits 1 where no actor runs."""
    found = read_status(to)
    if as_json:
        print_json([actor.to_wire() for actor in found])
    elif not found:
        typer.echo(f"no actor runs under {to}", err=True)
    for actor in () if as_json else found:
        console().print(_table(actor))
    if not found:
        raise typer.Exit(1)


def _table(status: ActorStatus) -> Table:
    account = status.account
    table = Table(title=f"{status.name}, attempt {status.attempt}", title_justify="left", show_header=False)
    for name, value in {
        "state": status.state + (f": {status.failure}" if status.failure else ""),
        "record": f"{status.directory}, segment {status.segment}",
        "process": f"pid {status.pid} on {status.host}, up for {status.up_s:.0f} s, {status.num_relays} relays",
        "ranks": f"{status.num_joined} of {status.num_ranks}, silent: {list(status.silent_ranks) or 'none'}",
        "steps": f"{account.num_committed} up to {account.last_committed_step}, {account.num_partial} lack ranks",
        "lag": f"{status.num_pending_steps} steps wait, the oldest for {status.oldest_wait_s:.1f} s; "
        f"newest step {status.newest_step}; last write {1e3 * status.last_write_s:.1f} ms",
        "packets": f"{account.num_abstained} abstained, {status.num_repeated} repeated, {status.num_late} late",
    }.items():
        table.add_row(name, value)
    return table
