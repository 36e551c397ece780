"""``rankfold report``: one page that says what a run was and what happened in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from launch.commands.series import complete_field
from launch.commands.shared import JsonOption, RunArgument, print_json

__all__ = ["report"]


def report(
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    field: Annotated[
        str, typer.Option(help="Field that the heat map shows first.", autocompletion=complete_field)
    ] = "rms",
    png: Annotated[Path | None, typer.Option(help="Also write the charts as PNG files into this folder.")] = None,
    title: Annotated[str | None, typer.Option(help="Heading; the name of the run directory by default.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a report of a run: one HTML file that needs no network."""
    from aggregator.report import render_png, write_report

    output.parent.mkdir(parents=True, exist_ok=True)
    with _shares() as tell:
        written = [write_report(run, output, field=field, title=title, progress=tell)]
        if png is not None:
            written += render_png(run, png, field=field, progress=tell)
    if as_json:
        print_json([{"path": str(path), "size_bytes": path.stat().st_size} for path in written])
    else:
        for path in written:
            typer.echo(f"{path}  {path.stat().st_size / 1e6:.2f} MB")


@contextmanager
def _shares() -> Iterator[Any]:
    """Show at a terminal what is being done and which share of all is done."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    with bar:
        task = bar.add_task("reading", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
