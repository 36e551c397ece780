"""How a writer takes possession of a run directory: begin a run, or continue one behind a fence.

The manifest is published, so of any number of processes that begin a run in one directory exactly one succeeds. A
segment is claimed by mkdir. Whoever continues a run seals all segments before its own: a writer of theirs that is still
alive finds the next index generation taken, and stops.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from uuid import uuid4

from aggregator.history.attempt import continues, current_attempt
from aggregator.history.documents import publish_document
from aggregator.history.fence import seal
from aggregator.history.layout import (
    CHUNK_FOLDER,
    CLAIM_SUFFIX,
    FORMAT,
    MANIFEST,
    SEGMENT,
    TEMPORARY_PREFIX,
    VERSION,
    index_name,
    segment_folder,
    segment_numbers,
)
from aggregator.history.publish import LINK, claim_of, fitting_way, sync_folder, uncontested
from aggregator.history.schema import CHECKSUMS, MERGE_RULES, PRESENCE_LABELS, REPLICA_LABELS, SCHEMAS
from aggregator.history.snapshot import SnapshotReader, read_manifest
from aggregator.history.sweep import sweep_run, sweep_segment
from telemetry.errors import (
    HistoryDamagedError,
    HistoryError,
    HistoryNotFoundError,
    RunDirectoryForeignError,
    RunDirectoryInUseError,
    RunDirectoryMissingRunError,
    RunDirectoryUnwritableError,
    SketchDescriptorMismatchError,
)
from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["Claim", "begin_run", "continue_run", "is_own_restart", "last_attempt", "last_committed_step", "withdraw"]


class Claim(NamedTuple):
    """A segment that is ours: run id, number, how files are published in this run, and what ``segment.json`` says."""

    run_id: str
    segment: int
    way: str
    record: Mapping[str, Any]


def begin_run(path: Path, run: Mapping[str, Any], descriptor: HistogramDescriptor) -> Claim:
    """Begin a run with segment 0 in an empty or new directory.

    Raises:
        RunDirectoryInUseError: there is a run, perhaps since a moment ago.
        RunDirectoryForeignError: there are other files.
        RunDirectoryUnwritableError: the directory cannot be made or written.
    """
    run_id = uuid4().hex
    try:
        path.mkdir(parents=True, exist_ok=True)
        _require_empty(path)
        sync_folder(path.parent)
        way = fitting_way(path)
        publish_document(path / MANIFEST, _manifest(run_id, run, descriptor, way), way)
    except FileExistsError as error:
        if path.is_dir():
            _refuse_used(path)
        raise _unwritable(path, error) from error
    except OSError as error:
        if (path / MANIFEST).exists():  # The winner of a race may have swept away what we were about to publish.
            _refuse_used(path)
        raise _unwritable(path, error) from error
    record = _segment(run_id, 0, None, None, run, descriptor)
    _open_segment(path, record, way)
    return Claim(run_id, 0, way, record)


def continue_run(
    path: Path, run: Mapping[str, Any], descriptor: HistogramDescriptor, resume_step: int, after: int | None = None
) -> Claim:
    """Claim the next segment of the run that is there.

    Args:
        path, run, descriptor, resume_step: see :meth:`aggregator.history.HistoryWriter.create`.
        after: the segment that must be the last one, because the caller has written it; None for whichever it is.

    Raises:
        RunDirectoryMissingRunError: there is no run.
        RunDirectoryInUseError: another process is continuing it at this very moment.
        SketchDescriptorMismatchError: the run counts histograms on another grid.
        RunDirectoryUnwritableError, HistoryDamagedError, HistoryVersionError: as they say.
    """
    try:
        manifest = read_manifest(path)
    except HistoryNotFoundError as error:
        raise RunDirectoryMissingRunError(
            f"resume_step={resume_step} was given, but {path} holds no run",
            remedy="give the directory of the run to continue, or leave resume_step out to begin a new run",
        ) from error
    theirs = HistogramDescriptor.from_wire(manifest["descriptor"])
    if theirs != descriptor:
        raise SketchDescriptorMismatchError(
            f"the run in {path} counts histograms on {theirs}, this attempt on {descriptor}",
            remedy="continue with the descriptor of the run, or choose another directory",
        )
    before = segment_numbers(path)
    parent = after if after is not None else before[-1] if before else None
    number = 0 if parent is None else parent + 1
    run_id, way = manifest["run_id"], manifest.get("publish", LINK)
    record = _segment(run_id, number, parent, resume_step, run, descriptor)
    _open_segment(path, record, way, before)
    return Claim(run_id, number, way, record)


def is_own_restart(path: Path) -> bool:
    """Tell whether the run in ``path`` is of an earlier attempt of the very job that this process belongs to."""
    return continues(current_attempt(), last_attempt(path))


def last_attempt(path: Path) -> Mapping[str, Any] | None:
    """Return the attempt that wrote the last segment of the run in ``path``; None if it is not known or not there."""
    with suppress(HistoryError, OSError):
        views = SnapshotReader().segments(path)
        attempt: Mapping[str, Any] | None = views[-1].record.get("attempt") if views else None
        return attempt
    return None


def _open_segment(path: Path, document: Mapping[str, Any], way: str, before: Sequence[int] = ()) -> None:
    folder = segment_folder(path, document["segment"])
    try:
        folder.mkdir()
        (folder / CHUNK_FOLDER).mkdir()
        sync_folder(path)
        for earlier in before:
            seal(segment_folder(path, earlier), way)
        publish_document(folder / SEGMENT, document, uncontested(way))
        for earlier in before:
            sweep_segment(segment_folder(path, earlier))
        sweep_run(path)
    except FileExistsError as error:
        raise RunDirectoryInUseError(
            f"another process is continuing the run in {path} at this moment (it has claimed {folder.name})",
            remedy="let one process continue a run; choose another directory for the other",
        ) from error
    except OSError as error:
        raise _unwritable(path, error) from error


def withdraw(path: Path, segment: int) -> None:
    """Take back the claim of a segment without commits, and the run with it if it was its first segment.

    Raises:
        OSError: the directory can no longer be written.
    """
    folder = segment_folder(path, segment)
    for entry in (folder / SEGMENT, *folder.glob(index_name(0))):
        entry.unlink(missing_ok=True)
    for claim in folder.glob(f"*{CLAIM_SUFFIX}"):
        claim.rmdir()
    (folder / CHUNK_FOLDER).rmdir()
    folder.rmdir()
    if segment == 0 and not segment_numbers(path):
        (path / MANIFEST).unlink(missing_ok=True)
        if claim_of(path / MANIFEST).exists():
            claim_of(path / MANIFEST).rmdir()
    sync_folder(path)


def _require_empty(path: Path) -> None:
    # Of a racing process that is not through with its own claim only a temporary file can be seen.
    names = sorted(
        entry.name
        for entry in path.iterdir()
        if not entry.name.startswith(TEMPORARY_PREFIX) and entry != claim_of(path / MANIFEST)
    )
    if (path / MANIFEST).exists():
        _refuse_used(path)
    if names:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise RunDirectoryForeignError(
            f"{path} holds files that are not of a run: {shown}",
            remedy="choose a new or an empty directory",
        )


def _refuse_used(path: Path) -> NoReturn:
    try:
        last = last_committed_step(path)
    except HistoryDamagedError as error:
        raise RunDirectoryInUseError(
            f"{path} already holds a run, and it is damaged: {error.message}", remedy="choose another directory"
        ) from error
    until = "no committed step yet" if last is None else f"steps up to {last}"
    advice = "" if last is None else f" (at most resume_step={last + 1} leaves no gap)"
    raise RunDirectoryInUseError(
        f"{path} already holds a run with {until}",
        remedy=f"choose another directory, or continue this run with resume_step=n{advice}",
    )


def last_committed_step(path: Path) -> int | None:
    """Return the newest step of the run's default view, None if there is none.

    Raises:
        HistoryDamagedError: an index is damaged.
    """
    newest = [
        min(view.index.last_step, view.end_step - 1 if view.end_step is not None else view.index.last_step)
        for view in SnapshotReader().segments(path)
        if view.index is not None and view.index.last_step is not None
    ]
    return max(newest, default=None)


def _unwritable(path: Path, error: OSError) -> RunDirectoryUnwritableError:
    return RunDirectoryUnwritableError(
        f"{path} cannot be written: {error.strerror or error}",
        remedy="choose a directory that rank zero can write",
    )


def _manifest(run_id: str, run: Mapping[str, Any], descriptor: HistogramDescriptor, way: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "min_reader": VERSION,
        "features": [],
        "publish": way,
        "run_id": run_id,
        "created_unix_s": time.time(),
        "run": run,
        "descriptor": descriptor.to_wire(),
        "presence": list(PRESENCE_LABELS),
        "replicas": list(REPLICA_LABELS),
        "tables": {
            name: [{"name": field.name, "type": str(field.type)} for field in schema]
            for name, schema in {**SCHEMAS, "checksums": CHECKSUMS}.items()
        },
        "merge_rules": MERGE_RULES,
    }


def _segment(
    run_id: str,
    number: int,
    parent: int | None,
    resume_step: int | None,
    run: Mapping[str, Any],
    descriptor: HistogramDescriptor,
) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "descriptor": descriptor.to_wire(),
        "segment": number,
        "uuid": uuid4().hex,
        "parent": parent,
        "resume_step": resume_step,
        "started_unix_s": time.time(),
        "attempt": current_attempt(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "run": run,
    }
