"""What is committed in a run at one moment: its segments with their newest index, and which steps of each one count.

Law: the default view has one row a step. A segment that begins at step n supersedes everything from n on in all
segments before it, whether or not its attempt came that far again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aggregator.history.documents import read_document
from aggregator.history.index import Index
from aggregator.history.layout import (
    FORMAT,
    MANIFEST,
    SEGMENT,
    VERSION,
    generations,
    index_name,
    segment_folder,
    segment_numbers,
)
from aggregator.history.losses import Loss
from telemetry.errors import HistoryDamagedError, HistoryError, HistoryNotFoundError, HistoryVersionError

__all__ = ["SegmentView", "SnapshotReader", "newest_index", "read_manifest", "salvaged_manifest"]

_MAX_TRIES: Final = 100


@dataclass(frozen=True)
class SegmentView:
    """One segment as it is now.

    Attributes:
        number, folder: which one, and where.
        record: body of its ``segment.json``.
        index: newest generation, None before the first commit.
        end_step: first step that a later segment supersedes, None if none does.
    """

    number: int
    folder: Path
    record: Mapping[str, Any]
    index: Index | None
    end_step: int | None

    def shows(self, step: int) -> bool:
        """Tell whether a step of this segment belongs to the default view."""
        return self.end_step is None or step < self.end_step


def read_manifest(run: Path) -> dict[str, Any]:
    """Return the manifest of a run.

    Raises:
        HistoryNotFoundError: there is no run here.
        HistoryDamagedError: the manifest is damaged.
        HistoryVersionError: a newer version wrote the run.
    """
    try:
        manifest = read_document(run / MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        there = "holds no run" if run.is_dir() else "is no run directory" if run.exists() else "does not exist"
        raise HistoryNotFoundError(
            f"{run} {there}: no {MANIFEST}", remedy="give the directory that was given to watch as `to`"
        ) from error
    if manifest["format"] != FORMAT or manifest["min_reader"] > VERSION:
        raise HistoryVersionError(
            f"{run} has format {manifest['format']} and asks for reader version {manifest['min_reader']}; "
            f"this is {FORMAT}, version {VERSION}",
            remedy="read the run with the version of Rankfold that wrote it, or a newer one",
        )
    return manifest


def salvaged_manifest(run: Path) -> dict[str, Any]:
    """Return what the first segment that can be read says of its run, in place of a damaged manifest.

    Raises:
        HistoryDamagedError: no segment can be read.
    """
    for number in segment_numbers(run):
        with suppress(HistoryDamagedError, FileNotFoundError):
            return read_document(segment_folder(run, number) / SEGMENT)
    raise HistoryDamagedError(f"{run} has neither a manifest nor a segment that can be read")


def newest_index(folder: Path) -> Index | None:
    """Read the newest generation of a segment, None before the first.

    Raises:
        HistoryDamagedError: its bytes are not what was written.
    """
    return SnapshotReader().index(folder)


class SnapshotReader:
    """Lists what is committed, again and again; a generation that was read once is kept.

    Args:
        losses: None to refuse damage; else it is noted there, and what is left is listed.
    """

    def __init__(self, losses: list[Loss] | None = None) -> None:
        self._indexes: dict[Path, Index] = {}
        self._losses = losses

    def segments(self, run: Path) -> tuple[SegmentView, ...]:
        """Return all segments that were taken up, in order.

        Raises:
            HistoryDamagedError: a document or an index is damaged or missing.
        """
        views: list[SegmentView] = []
        end_step: int | None = None
        for number in reversed(segment_numbers(run)):
            folder = segment_folder(run, number)
            index = self._index_or_loss(folder, number)
            record = self._record(folder, number, index)
            if record is None:
                continue
            if views and (index is None or not index.sealed):
                self._refuse(folder, number, index, f"{folder} has lost the index that sealed it")
            views.append(SegmentView(number, folder, record, index, end_step))
            starts = record["resume_step"]
            end_step = starts if end_step is None or (starts is not None and starts < end_step) else end_step
        return tuple(reversed(views))

    def _record(self, folder: Path, number: int, index: Index | None) -> Mapping[str, Any] | None:
        try:
            return read_document(folder / SEGMENT)
        except FileNotFoundError:
            if index is None or not index.num_commits:
                return None
            self._refuse(folder / SEGMENT, number, index, f"{folder / SEGMENT} is missing")
        except HistoryDamagedError as error:
            self._refuse(folder / SEGMENT, number, index, error.message)
        # Only when salvaging: where the segment begins stands in its index, too.
        return {"segment": number, "resume_step": index and index.start_step, "run": {}}

    def _index_or_loss(self, folder: Path, number: int) -> Index | None:
        try:
            return self.index(folder)
        except HistoryDamagedError as error:
            if self._losses is None:
                raise
            index = self._older_index(folder)
            path = folder / index_name(generations(folder)[-1])
            # What came after the older generation is lost, however far it went.
            first = None if index is None or index.last_step is None else index.last_step + 1
            self._losses.append(Loss(str(path), number, None, first, None, error.message))
            return index

    def _older_index(self, folder: Path) -> Index | None:
        for generation in reversed(generations(folder)[:-1]):
            path = folder / index_name(generation)
            with suppress(HistoryDamagedError, FileNotFoundError):
                return Index.from_bytes(path.read_bytes(), str(path))
        return None

    def _refuse(self, path: Path, number: int, index: Index | None, problem: str) -> None:
        steps = [] if index is None else [(entry.step_lo, entry.step_hi) for entry in index.entries]
        low, high = (min(s[0] for s in steps), max(s[1] for s in steps)) if steps else (None, None)
        if self._losses is None:
            within = f"; its segment has steps {low} to {high}" if steps else ""
            raise HistoryDamagedError(
                problem + within, remedy="restore the file from a copy; open_history(..., salvage=True) reads the rest"
            )
        self._losses.append(Loss(str(path), number, None, None, None, problem))

    def index(self, folder: Path) -> Index | None:
        """Return the newest generation of a segment, None before the first.

        Raises:
            HistoryDamagedError: its bytes are not what was written.
        """
        for _ in range(_MAX_TRIES):
            found = generations(folder)
            if not found:
                return None
            known = self._indexes.get(folder)
            if known is not None and known.generation == found[-1]:
                return known
            path = folder / index_name(found[-1])
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue  # The writer has published a newer one and removed this one: list again.
            self._indexes[folder] = Index.from_bytes(data, str(path))
            return self._indexes[folder]
        raise HistoryError(f"{folder} changes faster than it can be read", remedy="read it again")
