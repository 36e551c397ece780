"""Observations of many steps as one Parquet file, sorted by site, of which no byte is parsed before it is checked.

Row groups end between sites, so that one site is in one of them. Parquet's own page checksums leave page headers out
and most readers skip them. So the file next to it holds a CRC-32 of every column chunk, the index a SHA-256 of the
footer, and the reader below hands Parquet nothing but ranges that have passed.
"""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from aggregator.history.chunks import ChunkReader, checked_range, prefetch
from aggregator.history.damage import WRONG_HASH, damaged
from aggregator.history.index import ChunkEntry
from aggregator.history.schema import CHECKSUMS, OBSERVATIONS
from telemetry.errors import HistoryDamagedError

__all__ = ["ParquetFacts", "ParquetReader", "write_parquet"]

_MAGIC: Final = b"PAR1"
_KEPT_FOOTERS: Final = 256
_FOOTER_TAIL: Final = 8  # length and magic word at the end of the file
_ENCODINGS: Final = {
    field.name: "BYTE_STREAM_SPLIT" if pa.types.is_floating(field.type) else "DELTA_BINARY_PACKED"
    for field in OBSERVATIONS
    if pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
}
_LIST_ENCODINGS: Final = {
    f"{field.name}.list.element": "DELTA_BINARY_PACKED" for field in OBSERVATIONS if pa.types.is_list(field.type)
}


@dataclass(frozen=True)
class ParquetFacts:
    """What the index needs to know of a written file.

    Attributes:
        num_rows: rows written; group_site_starts: first site of each row group.
        footer: offset and bytes of the footer with all that follows it; sha256: of that range.
        checksums: table with schema ``CHECKSUMS``.
    """

    num_rows: int
    group_site_starts: tuple[int, ...]
    footer: tuple[int, int]
    sha256: bytes
    checksums: pa.Table


def write_parquet(path: Path, groups: Iterable[pa.Table]) -> ParquetFacts:
    """Write row groups with schema ``OBSERVATIONS``, ascending by site, as they come; not yet durable.

    Raises:
        OSError: the file cannot be written.
    """
    starts: list[int] = []
    with pq.ParquetWriter(
        path,
        OBSERVATIONS,
        compression="zstd",
        use_dictionary=["reason"],
        column_encoding={**_ENCODINGS, **_LIST_ENCODINGS},
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for group in groups:
            starts.append(group["site"][0].as_py())
            writer.write_table(group, row_group_size=group.num_rows)
    return _facts(path, tuple(starts))


def _facts(path: Path, starts: tuple[int, ...]) -> ParquetFacts:
    metadata = pq.read_metadata(path)
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        footer_bytes = metadata.serialized_size + _FOOTER_TAIL
        file.seek(size - footer_bytes)
        digest = hashlib.sha256(file.read()).digest()
        rows = []
        for i in range(metadata.num_row_groups):
            for j in range(metadata.num_columns):
                offset, length = _column_range(metadata, i, j)
                file.seek(offset)
                rows.append((i, j, offset, length, zlib.crc32(file.read(length))))
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), CHECKSUMS, strict=True)]
    checksums = pa.table(columns, schema=CHECKSUMS) if rows else CHECKSUMS.empty_table()
    return ParquetFacts(metadata.num_rows, starts, (size - footer_bytes, footer_bytes), digest, checksums)


def _column_range(metadata: pq.FileMetaData, row_group: int, column: int) -> tuple[int, int]:
    chunk = metadata.row_group(row_group).column(column)
    start = chunk.data_page_offset
    if chunk.has_dictionary_page:
        start = min(start, chunk.dictionary_page_offset)
    return start, chunk.total_compressed_size


@dataclass(frozen=True)
class _Layout:
    """A footer that has been checked, and where the column chunks are.

    Attributes:
        metadata: parsed; leaves: column of ``OBSERVATIONS`` → leaf columns.
        ranges: int64 ``[row groups, leaf columns, 3]``: offset, bytes and CRC-32 of each column chunk.
    """

    metadata: pq.FileMetaData
    leaves: dict[str, list[int]]
    ranges: NDArray[np.int64]

    def chosen(self, groups: Sequence[int], columns: Sequence[str]) -> list[tuple[int, int, int]]:
        """Return the ranges of columns in row groups, in the order of the file."""
        leaves = sorted(leaf for name in columns for leaf in self.leaves.get(name, ()))
        found = self.ranges[np.ix_(groups, leaves)].reshape(-1, 3).tolist()
        return [(offset, size, crc) for offset, size, crc in found]


class ParquetReader:
    """Reads columns of row groups; footers that have been checked are kept."""

    def __init__(self, chunks: ChunkReader) -> None:
        self._chunks = chunks
        self._layouts: OrderedDict[tuple[bytes, bytes], _Layout] = OrderedDict()

    def read(
        self,
        segment: Path,
        entry: ChunkEntry,
        checksums: ChunkEntry,
        columns: Sequence[str],
        site_ids: NDArray[np.uint64] | None = None,
    ) -> pa.Table:
        """Return the row groups in which the sites are, whole; those of other sites in the same groups come along.

        Args:
            segment, entry: which file.
            checksums: entry of the table of its checksums.
            columns: names of ``OBSERVATIONS``.
            site_ids: None for all row groups.

        Raises:
            FileNotFoundError: the file is gone, because a folded one took its place.
            HistoryDamagedError: bytes that are needed are not what was written.
        """
        layout = self._layout(segment, entry, checksums)
        groups = _groups(entry, site_ids)
        present = [name for name in columns if name in layout.leaves]
        if not groups or not present:
            return OBSERVATIONS.empty_table().select(present)
        parts = {}
        with open(segment / entry.file, "rb") as file:
            for offset, size, crc in layout.chosen(groups, present):
                file.seek(offset)
                data = file.read(size)
                if zlib.crc32(data) != crc or len(data) != size:
                    raise damaged(segment, entry, WRONG_HASH)
                parts[offset] = data
        return self._parse(segment, entry, layout, parts).read_row_groups(groups, columns=present, use_threads=False)

    def prefetch(
        self,
        segment: Path,
        entry: ChunkEntry,
        checksums: ChunkEntry,
        columns: Sequence[str],
        site_ids: NDArray[np.uint64],
    ) -> None:
        """Begin to read what :meth:`read` would; reads the footer itself.

        Raises:
            FileNotFoundError, HistoryDamagedError: as for :meth:`read`.
        """
        layout = self._layout(segment, entry, checksums)
        chosen = layout.chosen(_groups(entry, site_ids), columns)
        prefetch(segment, entry.file, ((offset, size) for offset, size, _ in chosen))

    def _parse(self, segment: Path, entry: ChunkEntry, layout: _Layout, parts: dict[int, bytes]) -> pq.ParquetFile:
        source = pa.PythonFile(_CheckedRanges(parts, entry.offset + entry.size_bytes), mode="r")
        return pq.ParquetFile(source, metadata=layout.metadata, page_checksum_verification=True, pre_buffer=False)

    def _layout(self, segment: Path, entry: ChunkEntry, checksums: ChunkEntry) -> _Layout:
        # Two files may have the same footer, so their checksums are part of what tells them apart.
        key = entry.sha256, checksums.sha256
        if (known := self._layouts.get(key)) is not None:
            self._layouts.move_to_end(key)
            return known
        footer = checked_range(segment, entry)
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
        leaves: dict[str, list[int]] = {}
        for i in range(metadata.num_columns):
            leaves.setdefault(metadata.schema.column(i).path.partition(".")[0], []).append(i)
        rows = self._chunks.read(segment, checksums)
        ranges = np.zeros((metadata.num_row_groups, metadata.num_columns, 3), np.int64)
        place = rows["row_group"].to_numpy(), rows["column"].to_numpy()
        ranges[place] = np.stack([rows[name].to_numpy() for name in ("offset", "size_bytes", "crc32")], axis=1)
        self._layouts[key] = layout = _Layout(metadata, leaves, ranges)
        while len(self._layouts) > _KEPT_FOOTERS:
            self._layouts.popitem(last=False)
        return layout

    def verify(self, segment: Path, entry: ChunkEntry, checksums: ChunkEntry) -> None:
        """Check every byte of a file.

        Raises:
            FileNotFoundError, HistoryDamagedError: as for :meth:`read`.
        """
        layout = self._layout(segment, entry, checksums)
        checked_range(segment, entry)
        with open(segment / entry.file, "rb") as file:
            intact = file.read(4) == _MAGIC
            for offset, size, crc in layout.ranges.reshape(-1, 3).tolist():
                file.seek(offset)
                intact = intact and zlib.crc32(file.read(size)) == crc
            intact = intact and file.seek(0, os.SEEK_END) == entry.offset + entry.size_bytes
        if not intact:
            raise damaged(segment, entry, WRONG_HASH)


def _groups(entry: ChunkEntry, site_ids: NDArray[np.uint64] | None) -> list[int]:
    starts = np.array(entry.group_site_starts, np.uint64)
    if site_ids is None:
        return list(range(len(starts)))
    inside = site_ids[(site_ids >= starts[0]) & (site_ids <= np.uint64(entry.site_hi or 0))]
    found: list[int] = np.unique(np.searchsorted(starts, inside, side="right") - 1).tolist()
    return found


class _CheckedRanges(io.RawIOBase):
    """A file that consists of the ranges that have been checked; a read outside of them is refused."""

    def __init__(self, parts: dict[int, bytes], size: int) -> None:
        self._parts = parts
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> Any:
        length = self._size - self._position if size is None or size < 0 else size
        part = self._parts.get(self._position)
        if part is None or len(part) < length:
            part = self._inside(length)
        self._position += length
        return part if len(part) == length else part[:length]

    def _inside(self, length: int) -> bytes:
        for start, data in self._parts.items():
            if start <= self._position and self._position + length <= start + len(data):
                return data[self._position - start :][:length]
        raise HistoryDamagedError(f"the footer points to bytes {self._position} and on, which no checksum covers")
