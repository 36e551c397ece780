"""Tables to the bytes of one Arrow chunk file, and back under the hash that the index holds for them."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

from aggregator.history.damage import WRONG_HASH, damaged
from aggregator.history.index import ChunkEntry
from aggregator.history.layout import chunk_name

__all__ = ["ChunkReader", "checked_range", "encode_chunk", "prefetch"]

_CACHE_BYTES: Final = 256 * 2**20
_STEP_COLUMN: Final = {"sites": "first_step"}


def encode_chunk(
    tables: Mapping[str, pa.Table], seq: tuple[int, int], level: int = 0, steps: tuple[int, int] | None = None
) -> tuple[bytes, tuple[ChunkEntry, ...]]:
    """Serialise the tables one after the other, each as an Arrow IPC stream of its own.

    Args:
        tables: name → rows; tables without rows are left out.
        seq: first and last commit in the file.
        level: 0 as committed, uncompressed so that readers copy nothing; above it, compressed.
        steps: first and last step, for tables that do not have a column of steps.

    Returns:
        The bytes of the file and one entry a table.
    """
    parts: list[bytes] = []
    entries: list[ChunkEntry] = []
    offset = 0
    for name, table in tables.items():
        if table.num_rows == 0:
            continue
        data = _to_stream(table, "zstd" if level else None)
        entries.append(_describe(name, table, data, offset, seq, level, steps))
        parts.append(data)
        offset += len(data)
    return b"".join(parts), tuple(entries)


def _to_stream(table: pa.Table, compression: str | None) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_table(table.combine_chunks())
    data: bytes = buffer.getvalue().to_pybytes()
    return data


def _describe(
    name: str,
    table: pa.Table,
    data: bytes,
    offset: int,
    seq: tuple[int, int],
    level: int,
    steps: tuple[int, int] | None,
) -> ChunkEntry:
    step = steps or _least_and_greatest(table[_STEP_COLUMN.get(name, "step")])
    sites = _least_and_greatest(table["site"]) if name in ("observations", "sites") else (None, None)
    return ChunkEntry(
        table=name,
        file=chunk_name(*seq, level),
        offset=offset,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).digest(),
        num_rows=table.num_rows,
        step_lo=step[0],
        step_hi=step[1],
        seq_lo=seq[0],
        seq_hi=seq[1],
        site_lo=sites[0],
        site_hi=sites[1],
        level=level,
    )


def _least_and_greatest(column: pa.ChunkedArray) -> tuple[int, int]:
    values = column.to_numpy()
    return int(values.min()), int(values.max())


def prefetch(segment: Path, file: str, ranges: Iterable[tuple[int, int]]) -> None:
    """Ask the operating system to begin to read ranges (offset, bytes), so that several are read at once.

    It may decline, and a file that is gone is found by whoever reads it.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), open(segment / file, "rb", buffering=0) as opened:
        for offset, size in ranges:
            os.posix_fadvise(opened.fileno(), offset, size, os.POSIX_FADV_WILLNEED)


def checked_range(segment: Path, entry: ChunkEntry) -> bytes:
    """Return the bytes that an entry points to.

    Raises:
        FileNotFoundError: the file is gone, because a folded one took its place.
        HistoryDamagedError: the bytes are not what was written.
    """
    with open(segment / entry.file, "rb") as file:
        file.seek(entry.offset)
        data = file.read(entry.size_bytes)
    if hashlib.sha256(data).digest() != entry.sha256:
        raise damaged(segment, entry, WRONG_HASH)
    return data


class ChunkReader:
    """Reads tables of Arrow chunk files, each range checked before it is parsed.

    Checked ranges are kept up to 256 MiB, the oldest go first: files never change, so they need no second look.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, pa.Buffer] = OrderedDict()
        self._kept_bytes = 0

    def read(self, segment: Path, entry: ChunkEntry) -> pa.Table:
        """Return the table of an entry.

        Raises:
            FileNotFoundError, HistoryDamagedError: as for :func:`checked_range`.
        """
        return pa.ipc.open_stream(self._checked(segment, entry)).read_all()

    def prefetch(self, segment: Path, entry: ChunkEntry) -> None:
        """Begin to read the range of an entry, unless it is kept; see :func:`prefetch`."""
        if entry.sha256 not in self._kept:
            prefetch(segment, entry.file, [(entry.offset, entry.size_bytes)])

    def _checked(self, segment: Path, entry: ChunkEntry) -> pa.Buffer:
        if (kept := self._kept.get(entry.sha256)) is not None:
            self._kept.move_to_end(entry.sha256)
            return kept
        buffer = pa.py_buffer(checked_range(segment, entry))
        self._kept[entry.sha256] = buffer
        self._kept_bytes += buffer.size
        while self._kept_bytes > _CACHE_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].size
        return buffer
