"""One generation of a segment's index: which bytes hold which rows, and the hash that each range must have.

The file is an Arrow IPC stream of one row a table and chunk file, followed by the SHA-256 of all bytes before it, so
that it is checked before anything parses it. Readers of Arrow stop at the end of the stream and never see the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from aggregator.history.layout import FORMAT
from telemetry.errors import HistoryDamagedError

__all__ = ["ChunkEntry", "ChunkFile", "Index"]

_DIGEST_BYTES: Final = 32
_METADATA_KEY: Final = b"rankfold.index"

_SCHEMA: Final = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("level", pa.uint8(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("sha256", pa.binary(_DIGEST_BYTES), nullable=False),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("step_lo", pa.int64(), nullable=False),
        pa.field("step_hi", pa.int64(), nullable=False),
        pa.field("seq_lo", pa.int64(), nullable=False),
        pa.field("seq_hi", pa.int64(), nullable=False),
        pa.field("site_lo", pa.uint64()),
        pa.field("site_hi", pa.uint64()),
        pa.field("group_site_starts", pa.list_(pa.uint64())),
    ]
)


@dataclass(frozen=True)
class ChunkEntry:
    """Where one table of one chunk file is, and what it covers.

    Attributes:
        table: ``observations``, ``steps``, ``sites``, ``findings``, or ``checksums`` (of a Parquet file).
        level: 0 as committed; 1 and 2 folded, where observations are Parquet and all else is Arrow IPC.
        file: path inside the segment.
        offset, size_bytes: the range in it. Of a Parquet file it is the footer, up to the end of the file.
        sha256: of that range.
        num_rows: rows of the table.
        step_lo, step_hi: first and last step, inclusive; seq_lo, seq_hi: first and last commit.
        site_lo, site_hi: least and greatest site id, None for tables without sites.
        group_site_starts: of a Parquet file, the first site id of each row group; a site is in one group only.
    """

    table: str
    file: str
    offset: int
    size_bytes: int
    sha256: bytes
    num_rows: int
    step_lo: int
    step_hi: int
    seq_lo: int
    seq_hi: int
    site_lo: int | None = None
    site_hi: int | None = None
    level: int = 0
    group_site_starts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ChunkFile:
    """What one commit, or one folding, has published: the entries that stand and fall together."""

    entries: tuple[ChunkEntry, ...]

    @property
    def level(self) -> int:
        """0 as committed, 1 and 2 folded."""
        return self.entries[0].level

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of its files; those of a Parquet file end where its footer ends."""
        return sum(e.size_bytes + (e.offset if e.group_site_starts is not None else 0) for e in self.entries)

    @property
    def seq(self) -> tuple[int, int]:
        """First and last commit in it."""
        return self.entries[0].seq_lo, self.entries[0].seq_hi

    @cached_property
    def rows(self) -> pa.RecordBatch:
        """Its rows of the index, which stay the same over all generations."""
        columns = [[getattr(entry, name) for entry in self.entries] for name in _SCHEMA.names]
        return pa.record_batch(
            [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
        )


@dataclass(frozen=True)
class Index:
    """A snapshot of one segment.

    Attributes:
        generation: counts up by one with each publication.
        sealed: nobody will publish a further generation.
        start_step: ``resume_step`` of the segment.
        last_step: newest committed step, None before the first.
        num_commits: steps committed.
        files: in the order of commits.
    """

    generation: int
    sealed: bool
    start_step: int | None
    last_step: int | None
    num_commits: int
    files: tuple[ChunkFile, ...]

    @cached_property
    def entries(self) -> tuple[ChunkEntry, ...]:
        """Of all files, in the order of commits."""
        return tuple(entry for file in self.files for entry in file.entries)

    @cached_property
    def rows(self) -> pa.Table:
        """The index as a table in one piece."""
        return pa.Table.from_batches([file.rows for file in self.files], _SCHEMA).combine_chunks()

    def followed_by(self, file: ChunkFile, last_step: int, num_commits: int) -> Index:
        """Return the next generation, with one more file; costs little, however many files there are."""
        index = replace(
            self,
            generation=self.generation + 1,
            last_step=last_step,
            num_commits=num_commits,
            files=(*self.files, file),
        )
        rows = pa.concat_tables([self.rows, pa.Table.from_batches([file.rows])]).combine_chunks()
        index.__dict__["rows"] = rows  # Where cached_property keeps it.
        return index

    def companion(self, entry: ChunkEntry, table: str) -> ChunkEntry | None:
        """Return the entry of another table that covers the same commits."""
        seq = entry.seq_lo, entry.seq_hi
        found = (e for file in self.files if file.seq == seq for e in file.entries if e.table == table)
        return next(found, None)

    def to_bytes(self) -> bytes:
        """Serialise; the inverse is :meth:`from_bytes`."""
        facts = {
            "format": FORMAT,
            "generation": self.generation,
            "sealed": self.sealed,
            "start_step": self.start_step,
            "last_step": self.last_step,
            "num_commits": self.num_commits,
        }
        rows = self.rows.replace_schema_metadata({_METADATA_KEY: json.dumps(facts).encode()})
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, rows.schema) as stream:
            stream.write_table(rows)
        data: bytes = buffer.getvalue().to_pybytes()
        return data + hashlib.sha256(data).digest()

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Index:
        """Check and parse what :meth:`to_bytes` wrote; ``where`` names the file in an error.

        Raises:
            HistoryDamagedError: the bytes are not what was written.
        """
        content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise HistoryDamagedError(
                f"{where} is damaged: its content does not have the hash it was written with, so none of the steps "
                "of its segment can be told",
                remedy="restore the file from a copy; open_history(..., salvage=True) reads all that is left",
            )
        table = pa.ipc.open_stream(content).read_all()
        facts: dict[str, Any] = json.loads(table.schema.metadata[_METADATA_KEY])
        return Index(
            facts["generation"],
            facts["sealed"],
            facts["start_step"],
            facts["last_step"],
            facts["num_commits"],
            _files(table.select([name for name in _SCHEMA.names if name in table.column_names])),
        )


def _files(table: pa.Table) -> tuple[ChunkFile, ...]:
    columns = {name: table[name].to_pylist() for name in table.column_names}
    columns["group_site_starts"] = [starts and tuple(starts) for starts in columns["group_site_starts"]]
    entries = [ChunkEntry(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    return tuple(ChunkFile(tuple(group)) for group in _by_commits(entries))


def _by_commits(entries: Iterable[ChunkEntry]) -> Iterable[Sequence[ChunkEntry]]:
    groups: dict[tuple[int, int], list[ChunkEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.seq_lo, entry.seq_hi), []).append(entry)
    return groups.values()
