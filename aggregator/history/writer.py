"""Where steps are committed: one writer, on rank zero, one segment of one run.

A commit publishes the step's tables and then the next generation of the index that lists them; when it returns, the
step survives the loss of the process and of the machine. A writer that is killed anywhere leaves the run as it was
after its last commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from aggregator.catalogue import MergedStep
from aggregator.history.chunks import ChunkReader, encode_chunk
from aggregator.history.claim import begin_run, continue_run, withdraw
from aggregator.history.compaction import ChunkFile, files_to_merge
from aggregator.history.encode import encode_findings, encode_observations, encode_sites, encode_step
from aggregator.history.index import Index
from aggregator.history.layout import index_name, segment_folder
from aggregator.history.publish import publish
from aggregator.history.schema import SCHEMAS
from telemetry.errors import HistoryWriteError, RankfoldError, StepOrderError, WriterFencedError
from telemetry.sites import SiteSpec
from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["HistoryWriter"]


class HistoryWriter:
    """Writes one segment. Made by :meth:`create`; not safe for several threads.

    Attributes:
        path: the run directory.
        run_id: 32 hexadecimal digits, the same for all segments of a run.
        segment: number of this attempt, 0 for the first.
        resume_step: first step of a segment that continues a run, else None.
    """

    def __init__(self, path: Path, run_id: str, segment: int, resume_step: int | None) -> None:
        self.path = path
        self.run_id = run_id
        self.segment = segment
        self.resume_step = resume_step
        self._folder = segment_folder(path, segment)
        self._index = Index(-1, False, None, 0, ())
        self._files: tuple[ChunkFile, ...] = ()
        self._written_sites: dict[int, SiteSpec] = {}
        self._superseded: list[str] = []
        self._failure: RankfoldError | None = None

    @staticmethod
    def create(
        path: Path | str, run: Mapping[str, Any], descriptor: HistogramDescriptor, resume_step: int | None = None
    ) -> HistoryWriter:
        """Begin a run in an empty or new directory, or continue the one that is there with a new segment.

        Args:
            path: the run directory.
            run: the run record, JSON-serialisable; kept in the segment, and for a new run in the manifest.
            descriptor: grid of the histograms, one for the whole run.
            resume_step: None for a new run, else the first step of the continuation. What earlier segments hold from
                this step on is superseded, not deleted.

        Raises:
            RunDirectoryInUseError: a run is there and ``resume_step`` is None, or another process is continuing it.
            RunDirectoryForeignError: a new run was asked for in a directory with other files.
            RunDirectoryMissingRunError: ``resume_step`` is given and no run is there.
            RunDirectoryUnwritableError: the directory cannot be made or written.
            SketchDescriptorMismatchError: the run that is there uses another grid.
        """
        directory = Path(path)
        if resume_step is None:
            return HistoryWriter(directory, begin_run(directory, run, descriptor), 0, None)
        run_id, segment = continue_run(directory, run, descriptor, resume_step)
        return HistoryWriter(directory, run_id, segment, resume_step)

    @property
    def last_step(self) -> int | None:
        """Newest committed step of this segment."""
        return self._index.last_step

    @property
    def num_commits(self) -> int:
        """Steps committed in this segment."""
        return self._index.num_commits

    def commit(self, step: MergedStep) -> None:
        """Make a step durable.

        Raises:
            StepOrderError: the step is not after the last one, or before the start of the segment; nothing changes.
            WriterFencedError: another process has continued the run.
            HistoryWriteError: the file system refused.
            HistoryDamagedError: chunks that were to be merged are no longer what was written.

        After any but the first of these every further commit raises the same.
        """
        self._require_order(step.step)
        with self._latching(step.step):
            self._publish_step(step)
            self._merge_chunks()

    def close(self) -> None:
        """Seal the segment: nobody will add to it. A second call does nothing, nor does one after a failure.

        Raises:
            WriterFencedError, HistoryWriteError: as for :meth:`commit`.
        """
        if self._index.sealed or self._failure is not None:
            return
        with self._latching(None):
            self._publish_index(self._files, self._index.last_step, self._index.num_commits, sealed=True)
            self._remove_superseded()

    def withdraw(self) -> None:
        """Take the claim back, for an attach that was refused elsewhere; only before the first commit.

        Raises:
            HistoryWriteError: the directory can no longer be written.
        """
        assert self.num_commits == 0, "a segment with commits is never taken back"
        with self._latching(None):
            withdraw(self.path, self.segment)
        self._index = Index(0, True, None, 0, ())

    def _require_order(self, step: int) -> None:
        last, start = self._index.last_step, self.resume_step
        if last is not None and step <= last:
            raise StepOrderError(
                f"step {step} was to follow step {last} in segment {self.segment}",
                step=step,
                remedy="step numbers must increase; a replay needs a new segment",
            )
        if start is not None and step < start:
            raise StepOrderError(
                f"segment {self.segment} begins at resume_step={start}",
                step=step,
                remedy="give the first step that is logged again as resume_step",
            )

    @contextmanager
    def _latching(self, step: int | None) -> Iterator[None]:
        """Turn what the file system says into our errors, and stay failed: after a failed sync nothing is certain."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except RankfoldError as error:
            self._failure = error
            raise
        except FileExistsError as error:
            self._failure = WriterFencedError(
                f"another process has continued the run in {self.path} after segment {self.segment}",
                step=step,
                remedy="stop this attempt; its steps up to the fence are kept",
            )
            raise self._failure from error
        except OSError as error:
            self._failure = HistoryWriteError(
                f"{self._folder} cannot be written: {error.strerror or error}",
                step=step,
                remedy="make room or restore the directory, then continue with resume_step; what was committed is kept",
            )
            raise self._failure from error

    def _publish_step(self, step: MergedStep) -> None:
        seq = self._index.num_commits
        fresh = self._undefined_sites(step)
        data, entries = encode_chunk(
            {
                "steps": encode_step(step),
                "observations": encode_observations(step.packet),
                "sites": encode_sites(fresh, step.step),
                "findings": encode_findings(step.packet.findings, step.step),
            },
            (seq, seq),
        )
        publish(self._folder / entries[0].file, data)
        self._publish_index((*self._files, ChunkFile(entries)), step.step, seq + 1)
        self._written_sites.update((site.site_id, site) for site in fresh)

    def _undefined_sites(self, step: MergedStep) -> list[SiteSpec]:
        """Return the sites whose definition is not yet stored as it is now; it may have gained names since."""
        named = zip(step.packet.sites.tolist(), step.sites, strict=True)
        found = {**{site.site_id: site for site in step.new_sites}, **dict(named)}
        return [site for site_id, site in found.items() if self._written_sites.get(site_id) != site]

    def _publish_index(
        self, files: tuple[ChunkFile, ...], last_step: int | None, num_commits: int, *, sealed: bool = False
    ) -> None:
        entries = tuple(entry for file in files for entry in file.entries)
        index = Index(self._index.generation + 1, sealed, last_step, num_commits, entries)
        publish(self._folder / index_name(index.generation), index.to_bytes())
        self._index, self._files = index, files
        # The generation before stays for readers that have just listed it.
        with suppress(OSError):
            (self._folder / index_name(index.generation - 2)).unlink()

    def _merge_chunks(self) -> None:
        while count := files_to_merge(self._files):
            inputs = self._files[-count:]
            merged = self._merged(inputs)
            self._publish_index((*self._files[:-count], merged), self._index.last_step, self._index.num_commits)
            self._remove_superseded()
            # Removed only at the next merge, so that a reader that has planned with them usually still finds them.
            self._superseded = [file.entries[0].file for file in inputs]

    def _merged(self, inputs: tuple[ChunkFile, ...]) -> ChunkFile:
        reader = ChunkReader()
        tables: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}
        for entry in (entry for file in inputs for entry in file.entries):
            tables[entry.table].append(reader.read(self._folder, entry))
        joined = {name: pa.concat_tables(parts) for name, parts in tables.items() if parts}
        seq = inputs[0].seq[0], inputs[-1].seq[1]
        data, entries = encode_chunk(joined, seq, inputs[0].tier + 1)
        publish(self._folder / entries[0].file, data)
        return ChunkFile(entries)

    def _remove_superseded(self) -> None:
        for file in self._superseded:
            with suppress(OSError):
                (self._folder / file).unlink()
        self._superseded = []
