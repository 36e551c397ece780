"""How bytes become a file that is either whole and durable or not there: the only place that writes a record.

A file is written under a temporary name, synced, and then given its final name in a way that fails if the name is
taken. So a writer that has been superseded but is still alive cannot overwrite its successor. There are two ways,
chosen when the run begins and kept in its manifest:

- ``link``: a hard link to the final name.
- ``claim``, for file systems without hard links: a folder ``NAME.claim`` is made, which fails if it exists, and then
  the file is renamed to the name that nobody else may give now. Names that only one writer ever gives need no claim.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar
from uuid import uuid4

from aggregator.history.layout import CLAIM_SUFFIX, TEMPORARY_PREFIX

__all__ = [
    "CLAIM",
    "CLAIMED",
    "LINK",
    "claim_name",
    "claim_of",
    "fitting_way",
    "publish",
    "publish_written",
    "sync_folder",
    "uncontested",
]

LINK: Final = "link"
CLAIM: Final = "claim"
CLAIMED: Final = "claimed"
"""As ``CLAIM``, by a caller that holds the claim or needs none."""

_T = TypeVar("_T")
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


def fitting_way(folder: Path) -> str:
    """Return ``LINK``, or ``CLAIM`` where the file system of ``folder`` has no hard links.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = folder / f"{TEMPORARY_PREFIX}{uuid4().hex}"
    second = temporary.with_name(f"{temporary.name}-2")
    try:
        _write(temporary, b"")
        os.link(temporary, second)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return CLAIM
    finally:
        for path in (temporary, second):
            with suppress(OSError):
                path.unlink()
    return LINK


def publish(path: Path, data: bytes, way: str = LINK) -> None:
    """Make ``data`` durable at ``path``; on return it survives the loss of the machine.

    Raises:
        FileExistsError: the name is taken.
        OSError: the bytes could not be written; the name is as it was.
    """
    publish_written(path, lambda temporary: _write(temporary, data), way)


def publish_written(path: Path, write: Callable[[Path], _T], way: str = LINK) -> _T:
    """Make durable at ``path`` what ``write`` puts into the temporary file that it is given, and return its result.

    Raises:
        FileExistsError, OSError: as for :func:`publish`.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid4().hex}")
    try:
        result = write(temporary)
        _sync(temporary, os.O_RDONLY)
        if way == LINK:
            os.link(temporary, path)
        else:
            if way == CLAIM:
                claim_name(path)
            os.rename(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    sync_folder(path.parent)
    return result


def uncontested(way: str) -> str:
    """Return the way to publish a name that nobody but the caller ever gives."""
    return CLAIMED if way == CLAIM else way


def claim_of(path: Path) -> Path:
    """Return the folder that stands for the right to give the name ``path``."""
    return path.with_name(path.name + CLAIM_SUFFIX)


def claim_name(path: Path) -> None:
    """Take the right to give a name, for good; whoever holds it may rename to that name once.

    Raises:
        FileExistsError: somebody has taken it.
    """
    os.mkdir(claim_of(path))


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
