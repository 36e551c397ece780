"""One generation of a segment's index: which bytes hold which rows, and the hash that each range must have.

The file is an Arrow IPC stream of one row a table and chunk file, followed by the SHA-256 of all bytes before it, so
that it is checked before anything parses it. Readers of Arrow stop at the end of the stream and never see the hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any, Final

import pyarrow as pa

from aggregator.history.layout import FORMAT
from telemetry.errors import HistoryDamagedError

__all__ = ["ChunkEntry", "Index"]

_DIGEST_BYTES: Final = 32
_METADATA_KEY: Final = b"rankfold.index"

# Levels above 0, Parquet footers and row-group starts have their columns from the first version on, so that a reader
# of today says by name what it cannot read.
_SCHEMA: Final = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("level", pa.uint8(), nullable=False),
        pa.field("tier", pa.uint8(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("sha256", pa.binary(_DIGEST_BYTES)),
        pa.field("footer_crc", pa.uint32()),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("step_lo", pa.int64(), nullable=False),
        pa.field("step_hi", pa.int64(), nullable=False),
        pa.field("site_lo", pa.uint64()),
        pa.field("site_hi", pa.uint64()),
        pa.field("seq_lo", pa.int64(), nullable=False),
        pa.field("seq_hi", pa.int64(), nullable=False),
        pa.field("group_site_starts", pa.list_(pa.uint64())),
    ]
)


@dataclass(frozen=True)
class ChunkEntry:
    """Where one table of one chunk file is, and what it covers.

    Attributes:
        table: ``observations``, ``steps``, ``sites`` or ``findings``.
        level: 0 for Arrow IPC; other levels are not written by this version.
        tier: how often the rows have been merged into a larger file.
        file: path inside the segment; offset, size_bytes: the range in it; sha256: of that range.
        num_rows: rows of the table.
        step_lo, step_hi: first and last step, inclusive; seq_lo, seq_hi: first and last commit.
        site_lo, site_hi: least and greatest site id, None for tables without sites.
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
    tier: int = 0


@dataclass(frozen=True)
class Index:
    """A snapshot of one segment.

    Attributes:
        generation: counts up by one with each publication.
        sealed: nobody will publish a further generation.
        last_step: newest committed step, None before the first.
        num_commits: steps committed.
        entries: in the order of commits.
    """

    generation: int
    sealed: bool
    last_step: int | None
    num_commits: int
    entries: tuple[ChunkEntry, ...]

    def to_bytes(self) -> bytes:
        """Serialise; the inverse is :meth:`from_bytes`."""
        facts = {
            "format": FORMAT,
            "generation": self.generation,
            "sealed": self.sealed,
            "last_step": self.last_step,
            "num_commits": self.num_commits,
        }
        schema = _SCHEMA.with_metadata({_METADATA_KEY: json.dumps(facts).encode()})
        rows = {name: [getattr(entry, name, None) for entry in self.entries] for name in _SCHEMA.names}
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, schema) as stream:
            stream.write_table(pa.table(rows, schema=schema))
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
                f"{where} is damaged: its content does not have the hash it was written with",
                remedy="restore the file from a copy, or move it away to read the generation before it, which lacks "
                "the newest commit",
            )
        table = pa.ipc.open_stream(content).read_all()
        facts: dict[str, Any] = json.loads(table.schema.metadata[_METADATA_KEY])
        names = [field.name for field in fields(ChunkEntry)]
        columns = [table[name].to_pylist() for name in names]
        entries = tuple(ChunkEntry(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True))
        return Index(facts["generation"], facts["sealed"], facts["last_step"], facts["num_commits"], entries)
