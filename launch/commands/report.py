"""``rankfold report``: one page that says what a run was and what happened in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.commands.series import complete_field
from launch.commands.shared import JsonOption, RunArgument, print_json, progress_of_shares

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
    with progress_of_shares("reading") as tell:
        written = [write_report(run, output, field=field, title=title, progress=tell)]
        if png is not None:
            written += render_png(run, png, field=field, progress=tell)
    if as_json:
        print_json([{"path": str(path), "size_bytes": path.stat().st_size} for path in written])
    else:
        for path in written:
            typer.echo(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
