"""How bytes become a file that is either whole and durable or not there: the only place that writes a record.

A file is written under a temporary name, synced, and then *linked* to its final name. Unlike a rename, a link fails
if the name is taken: a writer that has been superseded but is still alive cannot overwrite its successor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from aggregator.history.layout import TEMPORARY_PREFIX

__all__ = ["publish", "publish_written", "sync_folder"]

_T = TypeVar("_T")


def publish(path: Path, data: bytes) -> None:
    """Make ``data`` durable at ``path``; on return it survives the loss of the machine.

    Raises:
        FileExistsError: the name is taken.
        OSError: the bytes could not be written; the name is as it was.
    """
    publish_written(path, lambda temporary: _write(temporary, data))


def publish_written(path: Path, write: Callable[[Path], _T]) -> _T:
    """Make durable at ``path`` what ``write`` puts into the temporary file that it is given, and return its result.

    Raises:
        FileExistsError, OSError: as for :func:`publish`.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid4().hex}")
    try:
        result = write(temporary)
        _sync(temporary, os.O_RDONLY)
        os.link(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    sync_folder(path.parent)
    return result


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
