"""What is committed in a run at one moment: its segments with their newest index, and which steps of each one count.

Law: the default view has one row a step. A segment that begins at step n supersedes everything from n on in all
segments before it, whether or not its attempt came that far again.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from telemetry.errors import HistoryDamagedError, HistoryError, HistoryNotFoundError, HistoryVersionError

__all__ = ["SegmentView", "SnapshotReader", "newest_index", "read_manifest"]

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


def newest_index(folder: Path) -> Index | None:
    """Read the newest generation of a segment, None before the first.

    Raises:
        HistoryDamagedError: its bytes are not what was written.
    """
    return SnapshotReader().index(folder)


class SnapshotReader:
    """Lists what is committed, again and again; a generation that was read once is kept."""

    def __init__(self) -> None:
        self._indexes: dict[Path, Index] = {}

    def segments(self, run: Path) -> tuple[SegmentView, ...]:
        """Return all segments that were taken up, in order.

        Raises:
            HistoryDamagedError: a document or an index is damaged.
        """
        begun = [(number, record) for number in segment_numbers(run) if (record := self._record(run, number))]
        views: list[SegmentView] = []
        end_step: int | None = None
        for number, record in reversed(begun):
            folder = segment_folder(run, number)
            views.append(SegmentView(number, folder, record, self.index(folder), end_step))
            starts = record["resume_step"]
            end_step = starts if end_step is None or (starts is not None and starts < end_step) else end_step
        return tuple(reversed(views))

    def _record(self, run: Path, number: int) -> Mapping[str, Any] | None:
        folder = segment_folder(run, number)
        try:
            return read_document(folder / SEGMENT)
        except FileNotFoundError as error:
            if (index := self.index(folder)) is not None and index.num_commits:
                raise HistoryDamagedError(
                    f"{folder / SEGMENT} is missing, but the segment has {index.num_commits} committed steps",
                    remedy="restore the file from a copy",
                ) from error
            return None

    def index(self, folder: Path) -> Index | None:
        """Return the newest generation of a segment, None before the first."""
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
