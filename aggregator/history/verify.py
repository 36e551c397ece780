"""Every byte of a run against what was written: finds all damage, not only the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from aggregator.history.chunks import ChunkReader, checked_range
from aggregator.history.damage import MISSING, damaged
from aggregator.history.documents import read_document
from aggregator.history.index import ChunkEntry, ChunkFile, Index
from aggregator.history.layout import MANIFEST, SEGMENT, generations, index_name, segment_folder, segment_numbers
from aggregator.history.losses import Loss, losses_table
from aggregator.history.parquet import ParquetReader
from telemetry.errors import HistoryDamagedError

__all__ = ["verify"]


def verify(path: Path | str) -> pa.Table:
    """Read and check every byte of a run that a reader could ever look at.

    Returns:
        One row a damaged range: ``file segment table step_lo step_hi problem``; no rows if the run is whole. Steps are
        null where they cannot be told. Files that no index names are not part of the run.

    Example:
        >>> from aggregator.history import verify
        >>> verify("runs/exp1").num_rows  # doctest: +SKIP
        0
    """
    run = Path(path)
    losses = [*_document(run / MANIFEST, None, required=True)]
    for number in segment_numbers(run):
        losses += _segment(segment_folder(run, number), number)
    return losses_table(losses)


def _document(path: Path, number: int | None, *, required: bool) -> Iterator[Loss]:
    try:
        read_document(path)
    except HistoryDamagedError as error:
        yield Loss(str(path), number, None, None, None, error.message)
    except FileNotFoundError:
        if required:
            yield Loss(str(path), number, None, None, None, MISSING)


def _segment(folder: Path, number: int) -> Iterator[Loss]:
    indexes: list[Index] = []
    for generation in generations(folder):
        path = folder / index_name(generation)
        try:
            indexes.append(Index.from_bytes(path.read_bytes(), str(path)))
        except HistoryDamagedError as error:
            yield Loss(str(path), number, None, None, None, error.message)
        except FileNotFoundError:
            continue  # The writer has removed it, because there are newer ones.
    newest = indexes[-1] if indexes else None
    yield from _document(folder / SEGMENT, number, required=newest is not None and newest.num_commits > 0)
    for file in newest.files if newest is not None else ():
        yield from _file(folder, number, file)


def _file(folder: Path, number: int, file: ChunkFile) -> Iterator[Loss]:
    parquet = ParquetReader(ChunkReader())
    checksums = next((entry for entry in file.entries if entry.table == "checksums"), None)
    for entry in file.entries:
        if entry.group_site_starts is None:
            yield from _found(folder, number, entry, partial(_check_range, folder, file, entry))
        elif checksums is not None:
            yield from _found(folder, number, entry, partial(parquet.verify, folder, entry, checksums))


def _check_range(folder: Path, file: ChunkFile, entry: ChunkEntry) -> None:
    checked_range(folder, entry)
    named = sum(other.size_bytes for other in file.entries if other.file == entry.file)
    if (folder / entry.file).stat().st_size != named:
        raise damaged(folder, entry, "the file is longer than what was written")


def _found(folder: Path, number: int, entry: ChunkEntry, check: Callable[[], object]) -> Iterator[Loss]:
    try:
        check()
        return
    except FileNotFoundError:
        if _was_folded(folder, entry):
            return
        problem = MISSING
    except HistoryDamagedError as error:
        problem = error.message
    yield Loss(str(folder / entry.file), number, entry.table, entry.step_lo, entry.step_hi, problem)


def _was_folded(folder: Path, entry: ChunkEntry) -> bool:
    """Tell whether the newest index no longer names the file."""
    newest = folder / index_name(generations(folder)[-1])
    return all(other.file != entry.file for other in Index.from_bytes(newest.read_bytes(), str(newest)).entries)
