"""``rankfold export``: a record in the files of another program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow.csv
import pyarrow.parquet
import typer

from aggregator.history import History
from aggregator.sinks.protocol import RunInfo, Sink
from launch.commands.shared import (
    JsonOption,
    KindOption,
    RunArgument,
    SalvageOption,
    choose_series,
    complete_site,
    open_run,
    print_json,
    print_losses,
    progress,
    salvage_remedy,
)
from telemetry.errors import ConfigurationError

__all__ = ["Target", "export"]

_LISTS: Final = ("hist_bins", "hist_counts")


class Target(str, Enum):
    """What a record can become."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    jsonl = "jsonl"
    parquet = "parquet"
    csv = "csv"


def export(
    run: RunArgument,
    to: Annotated[Target, typer.Option("--to", help="Format to write.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="New file, or new folder.", show_default=False)],
    site: Annotated[
        str | None, typer.Option("--site", help="Only these sites: a name or a glob.", autocompletion=complete_site)
    ] = None,
    kind: KindOption = None,
    as_json: JsonOption = False,
    salvage: SalvageOption = False,
) -> None:
    """Write a record as TensorBoard events, a W&B run, JSON lines, Parquet or CSV.

    Parquet and CSV have one row for each scheduled observation; CSV leaves the histograms out. The others get what the
    sink of that name gets during a run, and take all sites.
    """
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise ConfigurationError(f"{output} is there already", remedy="give a new file or folder")
    is_table = to in (Target.parquet, Target.csv)
    if not is_table and (site is not None or kind is not None):
        raise typer.BadParameter(f"--site and --kind are for parquet and csv; {to.value} takes all sites")
    with salvage_remedy(salvage):
        history = open_run(run, salvage=salvage)
        done = _write_table(history, to, output, site, kind) if is_table else _write_sink(history, to, output)
    print_losses(history)
    if as_json:
        print_json({"to": to.value, "output": str(output), **done})
    else:
        counted = ", ".join(f"{number:,} {what}" for what, number in done.items())
        typer.echo(f"{output}: {counted}", err=True)


def _write_table(history: History, to: Target, output: Path, site: str | None, kind: str | None) -> dict[str, int]:
    names, kinds = None, kind
    if site is not None:
        names = list(dict.fromkeys(one.site for one in choose_series(history, site, kind)))
    reader = history.observation_batches(names, kinds)
    columns = [name for name in reader.schema.names if to is Target.parquet or name not in _LISTS]
    schema = reader.schema if to is Target.parquet else _plain(reader.schema, columns)
    output.parent.mkdir(parents=True, exist_ok=True)
    num_rows, newest = 0, None
    make: Callable[..., Any] = pyarrow.parquet.ParquetWriter if to is Target.parquet else pyarrow.csv.CSVWriter
    with make(str(output), schema) as writer, progress("steps", history.coverage().num_rows) as advance:
        for batch in reader:
            writer.write_batch(batch.select(columns).cast(schema))
            num_rows += batch.num_rows
            if batch.num_rows and batch["step"][-1] != newest:
                newest = batch["step"][-1]
                advance(len(batch["step"].unique()))
    return {"rows": num_rows}


def _plain(schema: pyarrow.Schema, columns: list[str]) -> pyarrow.Schema:
    """Return the columns with words for dictionaries, which CSV has not."""
    fields = [schema.field(name) for name in columns]
    return pyarrow.schema(
        [f.with_type(f.type.value_type) if pyarrow.types.is_dictionary(f.type) else f for f in fields]
    )


def _write_sink(history: History, to: Target, output: Path) -> dict[str, int]:
    sink = _make_sink(to, output)
    segments = history.segments().to_pylist()
    record = history.manifest["run"]
    info = RunInfo(
        run_id=history.run_id,
        segment=segments[-1]["segment"] if segments else 0,
        resume_step=None,
        world_size=record.get("world_size", 1),
        descriptor=history.descriptor,
        run=record,
    )
    num_steps = history.coverage().num_rows
    with progress("steps", num_steps) as advance, closing(sink):
        sink.open(info)
        for step in history.merged_steps():
            sink.emit(step)
            advance(1)
        sink.flush()
    return {"steps": num_steps}


def _make_sink(to: Target, output: Path) -> Sink:
    from aggregator import sinks

    if to is Target.tensorboard:
        return sinks.TensorBoardSink(output)
    if to is Target.jsonl:
        return sinks.JsonlSink(output)
    # Offline: the folder can be looked through, and sent with `wandb sync`.
    output.mkdir(parents=True, exist_ok=True)
    return sinks.WandbSink(dir=str(output), mode="offline", project="rankfold")
