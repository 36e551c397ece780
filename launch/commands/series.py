"""``rankfold series``: one field of one site, or of several, over the steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import typer

from aggregator.health.update_ratio import UPDATE_TO_WEIGHT
from aggregator.history import History
from launch.commands.shared import (
    JsonOption,
    KindOption,
    RunArgument,
    SalvageOption,
    Series,
    SiteArgument,
    choose_series,
    console,
    open_run,
    plain_table,
    print_json,
    print_losses,
    salvage_remedy,
)
from launch.commands.sparkline import sparkline
from telemetry.summary import SUMMARY_FIELDS

# Columns of a terminal that has room for all that there is to say of a series.
_WIDE: Final = 130

__all__ = ["FieldArgument", "TableFormat", "complete_field", "read_series", "series", "write_table"]


class TableFormat(str, Enum):
    """File formats of a table."""

    csv = "csv"
    parquet = "parquet"
    arrow = "arrow"


def complete_field(incomplete: str) -> list[str]:
    """Return the fields that begin as what was typed, for the shell."""
    return [name for name in (*SUMMARY_FIELDS, UPDATE_TO_WEIGHT) if name.startswith(incomplete)]


FieldArgument = Annotated[
    str,
    typer.Argument(
        help="Field of a summary, such as rms, absmax, nan or zero_fraction.", autocompletion=complete_field
    ),
]


def series(
    run: RunArgument,
    site: SiteArgument,
    field: FieldArgument = "rms",
    kind: KindOption = None,
    rows: Annotated[bool, typer.Option("--rows", help="Print every step instead of one line a series.")] = False,
    table_format: Annotated[
        TableFormat | None, typer.Option("--format", "-f", help="Write a table: step, kind, site, value.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File of --format; CSV goes to standard output without it.")
    ] = None,
    as_json: JsonOption = False,
    salvage: SalvageOption = False,
) -> None:
    """Show a field of the sites that a name or a glob means, over the steps."""
    if output is not None and table_format is None:
        raise typer.BadParameter("--output needs --format")
    if table_format in (TableFormat.parquet, TableFormat.arrow) and output is None:
        raise typer.BadParameter(f"--format {table_format.value} needs --output FILE")
    with salvage_remedy(salvage):
        history = open_run(run, salvage=salvage)
        chosen = choose_series(history, site, kind)
        if field == UPDATE_TO_WEIGHT:
            chosen = [one for one in chosen if one.kind == "update"] or chosen
        found = read_series(history, chosen, field)
    print_losses(history)
    if as_json:
        print_json([{"kind": s.kind, "site": s.site, "field": field, **table.to_pydict()} for s, table in found])
    elif table_format is not None:
        write_table(_long(found), table_format, output)
    elif rows:
        names = ("step", "kind", "site", field)
        lines = [(step, s.kind, s.site, value) for s, table in found for step, value in _pairs(table)]
        console().print(plain_table("", names, lines, right=("step", field)))
    else:
        _print_lines(found, field)


def read_series(history: History, chosen: Sequence[Series], field: str) -> list[tuple[Series, pa.Table]]:
    """Return for each series its steps and values, columns ``step value``.

    Raises:
        FieldUnknownError: with near names.
    """
    if field == UPDATE_TO_WEIGHT or len(chosen) == 1:
        return [(one, history.series(one.site, one.kind, field)) for one in chosen]
    kinds = list(dict.fromkeys(one.kind for one in chosen))
    names = list(dict.fromkeys(one.site for one in chosen))
    table = history.observations(names, kinds, columns=["step", "kind", "site", "series", field])
    found = []
    for one in chosen:
        mine = pc.and_(pc.equal(table["kind"], one.kind), pc.equal(table["site"], one.site))
        part = table.filter(pc.and_(mine, pc.equal(table["series"], one.number)))
        found.append((one, part.select(["step", field]).rename_columns(["step", "value"])))
    return found


def write_table(table: pa.Table, table_format: TableFormat, output: Path | None) -> None:
    """Write a table to a file, or as CSV to standard output where ``output`` is None."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    if table_format is TableFormat.csv:
        if output is None:
            pyarrow.csv.write_csv(table, pa.output_stream(sys.stdout.buffer))
        else:
            pyarrow.csv.write_csv(table, str(output))
    elif table_format is TableFormat.parquet:
        pyarrow.parquet.write_table(table, str(output))
    else:
        pyarrow.feather.write_feather(table, str(output))
    if output is not None:
        typer.echo(f"{table.num_rows:,} rows in {output}", err=True)


def _long(found: Sequence[tuple[Series, pa.Table]]) -> pa.Table:
    parts = [
        pa.table(
            {
                "step": table["step"],
                "kind": pa.array([s.kind] * table.num_rows, pa.string()),
                "site": pa.array([s.site] * table.num_rows, pa.string()),
                "value": table["value"],
            }
        )
        for s, table in found
    ]
    return pa.concat_tables(part.replace_schema_metadata(None) for part in parts)


def _pairs(table: pa.Table) -> list[tuple[int, Any]]:
    return list(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


def _print_lines(found: Sequence[tuple[Series, pa.Table]], field: str) -> None:
    out = console()
    draws_unicode = (out.encoding or "").lower().startswith("utf")
    is_wide = out.width >= _WIDE
    lines = []
    for s, table in found:
        values = table["value"].to_pylist()
        known = np.array([value for value in values if value is not None], dtype=np.float64)
        ends = (
            (float(known[0]), float(known[-1]), float(known.min()), float(known.max())) if len(known) else (None,) * 4
        )
        first, last, low, high = ends
        drawn = sparkline(values, 32 if is_wide else 12, unicode=draws_unicode)
        more = (first, low, high, len(known), len(values) - len(known)) if is_wide else (high,)
        lines.append((s.kind, s.site, drawn, last, *more))
    more_names = ("first", "lowest", "highest", "steps", "no value") if is_wide else ("highest",)
    names = ("kind", "site", field, "last", *more_names)
    out.print(plain_table("", names, lines, right=names[3:]))
