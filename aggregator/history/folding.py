"""When committed chunks are folded, and how: many small files by step become one large file by site.

Without it the index, which each commit publishes, would grow with the run, and one series would be spread over as many
files as there are steps. Inputs are read under their hashes, rows are counted, and the result is written site block by
site block, so that memory does not grow with the size of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.history.chunks import ChunkReader, encode_chunk
from aggregator.history.index import ChunkEntry, ChunkFile
from aggregator.history.layout import chunk_name
from aggregator.history.parquet import ParquetFacts, ParquetReader, write_parquet
from aggregator.history.publish import publish, publish_written, uncontested
from aggregator.history.schema import OBSERVATIONS, SCHEMAS
from telemetry.errors import HistoryDamagedError

__all__ = ["FoldingPolicy", "fold", "foldable"]

# By level of the file: a site has more rows in one of a higher level, and a footer lists each column of each group.
ROWS_A_GROUP: Final = (0, 16_384, 65_536)
ROWS_A_BLOCK: Final = 262_144
_SMALL_TABLES: Final = tuple(name for name in SCHEMAS if name != "observations")


@dataclass(frozen=True)
class FoldingPolicy:
    """When files are due to become one.

    Attributes:
        fan_in: files of level 0, then of level 1, that become one of the next level.
        max_bytes: or fewer, if they are as large as this together.
        max_unfolded: a commit waits for folding while so many files of level 0 are there.
        max_wait_s: but no longer than this; the index then grows.
        grace_s: folded files stay for so long, for readers that have planned with them.
    """

    fan_in: tuple[int, int] = (64, 16)
    max_bytes: tuple[int, int] = (64 * 2**20, 512 * 2**20)
    max_unfolded: int = 256
    max_wait_s: float = 30.0
    grace_s: float = 5.0


def foldable(files: Sequence[ChunkFile], policy: FoldingPolicy) -> tuple[ChunkFile, ...]:
    """Return the neighbouring files that are due to become one of the next level, () if none are."""
    for level, (fan_in, max_bytes) in enumerate(zip(policy.fan_in, policy.max_bytes, strict=True)):
        same = [file for file in files if file.level == level]
        size = 0
        for count, file in enumerate(same, 1):
            size += file.size_bytes
            if count == fan_in or size >= max_bytes:
                return tuple(same[:count])
    return ()


def fold(segment: Path, inputs: Sequence[ChunkFile], way: str, check_going: Callable[[], None]) -> ChunkFile:
    """Publish the files of the next level and return their entries; the inputs stay.

    Args:
        segment: the folder.
        inputs: neighbouring files of one level.
        way: how files are published in this run.
        check_going: called between blocks, to raise if the work is to be given up.

    Raises:
        HistoryDamagedError: an input is not what was written.
        OSError: the file system refused.
    """
    way = uncontested(way)
    seq, level = (inputs[0].seq[0], inputs[-1].seq[1]), inputs[0].level + 1
    steps = _span(entry for file in inputs for entry in file.entries)
    chunks = ChunkReader()
    small = {name: _concatenated(segment, inputs, name, chunks) for name in _SMALL_TABLES}
    observations = _entries(inputs, "observations")
    folded: tuple[ChunkEntry, ...] = ()
    if observations:
        sources = [_Source(segment, file, chunks) for file in inputs if _entries([file], "observations")]
        file = chunk_name(*seq, level, "parquet")
        groups = _groups(sources, level, check_going)
        facts = publish_written(segment / file, lambda path: write_parquet(path, groups), way)
        _require_all_rows(segment, file, sum(entry.num_rows for entry in observations), facts)
        small["checksums"] = facts.checksums
        folded = (_observation_entry(file, observations, facts, seq, level),)
    data, entries = encode_chunk(small, seq, level, steps)
    publish(segment / chunk_name(*seq, level), data, way)
    return ChunkFile((*(_exact(entry, inputs) for entry in entries), *folded))


def _entries(files: Iterable[ChunkFile], table: str) -> list[ChunkEntry]:
    return [entry for file in files for entry in file.entries if entry.table == table]


def _span(entries: Iterable[ChunkEntry]) -> tuple[int, int]:
    spans = [(entry.step_lo, entry.step_hi) for entry in entries]
    return min(low for low, _ in spans), max(high for _, high in spans)


def _exact(entry: ChunkEntry, inputs: Sequence[ChunkFile]) -> ChunkEntry:
    """Narrow the steps of an entry to those of its own table."""
    sources = _entries(inputs, entry.table)
    low, high = _span(sources) if sources else (entry.step_lo, entry.step_hi)
    return replace(entry, step_lo=low, step_hi=high)


def _concatenated(segment: Path, inputs: Sequence[ChunkFile], name: str, chunks: ChunkReader) -> pa.Table:
    parts = [chunks.read(segment, entry) for entry in _entries(inputs, name)]
    return pa.concat_tables([SCHEMAS[name].empty_table(), *parts], promote_options="default")


def _observation_entry(
    file: str, inputs: Sequence[ChunkEntry], facts: ParquetFacts, seq: tuple[int, int], level: int
) -> ChunkEntry:
    low, high = _span(inputs)
    return ChunkEntry(
        table="observations",
        file=file,
        offset=facts.footer[0],
        size_bytes=facts.footer[1],
        sha256=facts.sha256,
        num_rows=facts.num_rows,
        step_lo=low,
        step_hi=high,
        seq_lo=seq[0],
        seq_hi=seq[1],
        site_lo=min(entry.site_lo or 0 for entry in inputs),
        site_hi=max(entry.site_hi or 0 for entry in inputs),
        level=level,
        group_site_starts=facts.group_site_starts,
    )


def _require_all_rows(segment: Path, file: str, expected: int, facts: ParquetFacts) -> None:
    if facts.num_rows != expected:
        raise HistoryDamagedError(
            f"{segment / file} came out with {facts.num_rows} rows of {expected}; what it was made of stays as it is"
        )


class _Source:
    """Observations of one input; of an Arrow file they are read once, of a Parquet file by range of sites."""

    def __init__(self, segment: Path, file: ChunkFile, chunks: ChunkReader) -> None:
        (self._entry,) = _entries([file], "observations")
        self._checksums = next(iter(_entries([file], "checksums")), None)
        self._segment, self._parquet = segment, ParquetReader(chunks)
        self._whole = chunks.read(segment, self._entry) if self._checksums is None else None

    def sites(self) -> NDArray[np.uint64]:
        """Return the site of every row."""
        column: NDArray[np.uint64] = self._table(["site"], None)["site"].to_numpy()
        return column

    def rows(self, sites: NDArray[np.uint64]) -> pa.Table:
        """Return the rows of ``sites``, a range of the ascending sites of all inputs, by step within a site."""
        table = self._table(OBSERVATIONS.names, sites)
        column = table["site"].to_numpy()
        if len(column) and sites[0] <= column.min() and column.max() <= sites[-1]:
            return table
        return table.filter(pa.array((column >= sites[0]) & (column <= sites[-1])))

    def _table(self, columns: Sequence[str], sites: NDArray[np.uint64] | None) -> pa.Table:
        if self._checksums is None:
            assert self._whole is not None
            return self._whole.select([name for name in columns if name in self._whole.column_names])
        return self._parquet.read(self._segment, self._entry, self._checksums, columns, sites)


def _groups(sources: Sequence[_Source], level: int, check_going: Callable[[], None]) -> Iterator[pa.Table]:
    """Yield row groups in ascending order of sites, each site in one group, its rows by step."""
    sites, counts = np.unique(np.concatenate([source.sites() for source in sources]), return_counts=True)
    for block in _cut(sites, counts, ROWS_A_BLOCK):
        check_going()
        parts = [source.rows(block) for source in sources]
        rows = pa.concat_tables([OBSERVATIONS.empty_table(), *parts], promote_options="default").combine_chunks()
        ordered = rows.take(pa.array(np.argsort(rows["site"].to_numpy(), kind="stable")))
        inside = np.isin(sites, block)
        first = 0
        for group in _cut(sites[inside], counts[inside], ROWS_A_GROUP[level]):
            length = int(counts[np.isin(sites, group)].sum())
            yield ordered.slice(first, length)
            first += length


def _cut(sites: NDArray[np.uint64], counts: NDArray[np.int64], rows: int) -> Iterator[NDArray[np.uint64]]:
    """Cut ascending sites into runs that have about ``rows`` rows each."""
    place = (np.cumsum(counts) - counts) // rows
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    yield from np.split(sites, starts[1:])
