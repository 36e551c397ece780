"""Tables to the bytes of one chunk file, and back under the hash that the index holds for them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from aggregator.history.index import ChunkEntry
from aggregator.history.layout import chunk_name
from telemetry.errors import HistoryDamagedError, HistoryVersionError

__all__ = ["ChunkReader", "damaged", "encode_chunk"]

_CACHE_BYTES: Final = 256 * 2**20


def encode_chunk(
    tables: Mapping[str, pa.Table], seq: tuple[int, int], tier: int = 0
) -> tuple[bytes, tuple[ChunkEntry, ...]]:
    """Serialise the tables one after the other, each as an Arrow IPC stream of its own.

    Args:
        tables: name → rows; tables without rows are left out.
        seq: first and last commit in the file.
        tier: how often the rows have been merged.

    Returns:
        The bytes of the file and one entry a table.
    """
    parts: list[bytes] = []
    entries: list[ChunkEntry] = []
    offset = 0
    for name, table in tables.items():
        if table.num_rows == 0:
            continue
        data = _to_stream(table)
        entries.append(_describe(name, table, data, offset, seq, tier))
        parts.append(data)
        offset += len(data)
    return b"".join(parts), tuple(entries)


def _to_stream(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    data: bytes = buffer.getvalue().to_pybytes()
    return data


def _describe(name: str, table: pa.Table, data: bytes, offset: int, seq: tuple[int, int], tier: int) -> ChunkEntry:
    steps = pc.min_max(table["first_step" if name == "sites" else "step"]).as_py()
    sites = pc.min_max(table["site"]).as_py() if pa.types.is_uint64(_site_type(table)) else {"min": None, "max": None}
    return ChunkEntry(
        table=name,
        file=chunk_name(*seq),
        offset=offset,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).digest(),
        num_rows=table.num_rows,
        step_lo=steps["min"],
        step_hi=steps["max"],
        seq_lo=seq[0],
        seq_hi=seq[1],
        site_lo=sites["min"],
        site_hi=sites["max"],
        tier=tier,
    )


def _site_type(table: pa.Table) -> pa.DataType:
    return table.schema.field("site").type if "site" in table.schema.names else pa.null()


class ChunkReader:
    """Reads tables of chunk files, each range checked before it is parsed.

    Checked ranges are kept up to 256 MiB, the oldest go first: files never change, so they need no second look.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, pa.Buffer] = OrderedDict()
        self._kept_bytes = 0

    def read(self, segment: Path, entry: ChunkEntry) -> pa.Table:
        """Return the table of an entry.

        Raises:
            FileNotFoundError: the file is gone, because a merged one took its place.
            HistoryDamagedError: the bytes are not what was written.
            HistoryVersionError: the entry is of a level that a newer version writes.
        """
        if entry.level != 0:
            raise HistoryVersionError(
                f"{segment / entry.file} is of level {entry.level}; this version reads level 0",
                remedy="read the run with the version of Rankfold that wrote it",
            )
        return pa.ipc.open_stream(self._checked(segment, entry)).read_all()

    def _checked(self, segment: Path, entry: ChunkEntry) -> pa.Buffer:
        if (kept := self._kept.get(entry.sha256)) is not None:
            self._kept.move_to_end(entry.sha256)
            return kept
        with open(segment / entry.file, "rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.size_bytes)
        if hashlib.sha256(data).digest() != entry.sha256:
            raise damaged(segment, entry, "its content does not have the hash it was written with")
        return self._keep(entry.sha256, pa.py_buffer(data))

    def _keep(self, key: bytes, buffer: pa.Buffer) -> pa.Buffer:
        self._kept[key] = buffer
        self._kept_bytes += buffer.size
        while self._kept_bytes > _CACHE_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].size
        return buffer


def damaged(segment: Path, entry: ChunkEntry, why: str) -> HistoryDamagedError:
    """Return the refusal of a chunk, with its file and the steps that it held."""
    return HistoryDamagedError(
        f"{segment / entry.file} is damaged in table {entry.table}, steps {entry.step_lo} to {entry.step_hi}: {why}",
        step=entry.step_lo,
        remedy="restore the file from a copy; the steps outside of this range can be read by naming them",
    )
