"""Removes what killed writers have left in a segment: files that no index names, and never will.

Only a sealed segment is swept. Its sealed index is the last one that it gets: a writer that is still alive finds the
name of the next generation taken, whatever it has written beside it. So a file that this index does not name is not
part of the record, and cannot become part of it. Readers need none either: they read what their index names, and list
anew when a file of theirs has gone. What stays for both: the generation before the last, and with claims, every claim.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from aggregator.history.layout import (
    CHUNK_FOLDER,
    TEMPORARY_PREFIX,
    generations,
    index_name,
    is_chunk_name,
)
from aggregator.history.snapshot import newest_index
from telemetry.errors import HistoryError

__all__ = ["sweep_run", "sweep_segment"]


def sweep_segment(folder: Path) -> None:
    """Remove what no index of a sealed segment names; does nothing to one that is not sealed, and never raises."""
    with suppress(OSError, HistoryError):
        index = newest_index(folder)
        if index is None or not index.sealed:
            return
        named = {entry.file for entry in index.entries}
        for entry in (folder / CHUNK_FOLDER).iterdir():
            name = f"{CHUNK_FOLDER}/{entry.name}"
            if _is_temporary(entry) or (is_chunk_name(name) and name not in named):
                _remove(entry)
        for generation in generations(folder)[:-2]:
            _remove(folder / index_name(generation))
        _remove_temporaries(folder)


def sweep_run(run: Path) -> None:
    """Remove what processes that raced to begin the run have left beside its manifest; never raises."""
    with suppress(OSError):
        _remove_temporaries(run)


def _remove_temporaries(folder: Path) -> None:
    for entry in folder.iterdir():
        if _is_temporary(entry):
            _remove(entry)


def _is_temporary(entry: Path) -> bool:
    return entry.name.startswith(TEMPORARY_PREFIX)


def _remove(entry: Path) -> None:
    with suppress(OSError):
        entry.unlink()
