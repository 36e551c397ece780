"""What the doctor looks at beside versions: imports that hide ours, the storage of a run, the layout of a job."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from aggregator.history.publish import LINK, fitting_way
from launch.clocks import kernel_clock_error_s
from telemetry.errors import ConfigurationError, RankfoldError
from telemetry.layout import ParallelLayout

__all__ = [
    "Check",
    "check_clock",
    "check_imports",
    "check_layout",
    "check_ray",
    "check_storage",
    "existing_part",
    "parse_sizes",
    "sync_seconds",
]

OURS: Final = ("telemetry", "aggregator", "launch")
_DISTRIBUTION: Final = "rankfold"
_RAY_SINCE: Final = (2, 49)
_NETWORK: Final = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p", "afs", "glusterfs")
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_NUM_SYNCS: Final = 16
_SLOW_SYNC_S: Final = 0.1
_LITTLE_SPACE_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what; state: ``ok``, ``warning`` (works, with a price) or ``failed`` (a job would be refused or go wrong).
        found: what is there; remedy: what to do, "" where nothing is to be done.
    """

    name: str
    state: str
    found: str
    remedy: str = ""


def check_imports(folder: Path, search_path: Iterable[str] | None = None) -> list[Check]:
    """Look for whatever would be imported in place of our packages by a script in ``folder``.

    Args:
        folder: of the training script.
        search_path: ``sys.path`` of this process if None.
    """
    checks = []
    owners = packages_distributions()
    for name in OURS:
        hiding = _hiding(name, folder, sys.path if search_path is None else search_path)
        others = sorted({owner for owner in owners.get(name, []) if owner.lower() != _DISTRIBUTION})
        if hiding is not None:
            checks.append(
                Check(
                    f"import {name}",
                    "failed",
                    f"a script in {folder} would import {hiding}",
                    "rename that file or folder, or move it into a package of your own",
                )
            )
        elif others:
            text = f"{', '.join(others)} also installs a package of this name"
            checks.append(Check(f"import {name}", "failed", text, f"pip uninstall {' '.join(others)}"))
        else:
            checks.append(Check(f"import {name}", "ok", "ours"))
    return checks


def _hiding(name: str, folder: Path, search_path: Iterable[str]) -> Path | None:
    spec = find_spec(name)
    places = [spec.origin or "", *(spec.submodule_search_locations or [])] if spec is not None else []
    ours = {Path(place).resolve() for place in places if place}
    ours |= {path.parent for path in ours if path.name == "__init__.py"}
    for place in (str(folder), *search_path):
        for candidate in (Path(place) / name / "__init__.py", Path(place) / f"{name}.py"):
            if candidate.exists():
                found = candidate.resolve()
                return None if found in ours or found.parent in ours else candidate
    return None


def check_storage(folder: Path) -> list[Check]:
    """Look at the file system that a run directory would lie on; writes and removes a few small files.

    Args:
        folder: of the run, or where it will be; the nearest folder that exists is tried.
    """
    place = existing_part(folder)
    kind, mount = _file_system(place)
    if not place.is_dir():
        return [Check("storage", "failed", f"{place} is no folder", "name another run directory")]
    try:
        with TemporaryDirectory(prefix=".rankfold-doctor-", dir=place) as scratch:
            way, sync_s = fitting_way(Path(scratch)), sync_seconds(Path(scratch))
    except (OSError, RankfoldError) as error:
        return [Check("storage", "failed", f"{place} cannot be written: {error}", "name another run directory")]
    free = shutil.disk_usage(place).free
    return [
        _kind_check(kind, mount),
        Check("hard links", "ok", "there")
        if way == LINK
        else Check("hard links", "warning", "none: files are published by claims and renames, which still fence"),
        Check("sync of a file", "ok", f"{sync_s * 1e3:.2g} ms, median of {_NUM_SYNCS}")
        if sync_s < _SLOW_SYNC_S
        else Check(
            "sync of a file",
            "warning",
            f"{sync_s * 1e3:.3g} ms, median of {_NUM_SYNCS}: steps become durable late",
            "name a run directory on faster storage",
        ),
        Check("free space", "ok", f"{free / 1e9:.1f} GB")
        if free > _LITTLE_SPACE_BYTES
        else Check("free space", "warning", f"{free / 1e9:.2f} GB", "make room, or name another run directory"),
    ]


def existing_part(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_clock() -> Check:
    """Ask the kernel whether something keeps its clock in time."""
    error_s = kernel_clock_error_s()
    if error_s is None:
        return Check("clock", "ok", "this system does not tell whether it is kept in time")
    if error_s == float("inf"):
        remedy = "run chrony, ntpd or systemd-timesyncd; on several nodes the doctor of each compares them: --nnodes"
        return Check("clock", "warning", "nothing keeps it in time", remedy)
    return Check("clock", "ok", f"kept in time, off by {error_s * 1e3:.3g} ms at most")


def check_ray() -> list[Check]:
    """Look at an installed Ray; nothing where there is none, because most jobs need none."""
    try:
        there = version("ray")
    except PackageNotFoundError:
        return []
    if tuple(int(part) for part in there.split(".")[:2]) < _RAY_SINCE:
        wanted = ".".join(map(str, _RAY_SINCE))
        return [Check("ray", "warning", f"{there}, tested since {wanted}", 'pip install -U "ray[train]"')]
    return [Check("ray", "ok", there)]


def _kind_check(kind: str, mount: str) -> Check:
    text = f"{kind} at {mount}"
    if kind in _IN_MEMORY:
        return Check("file system", "warning", f"{text}: lost with the machine", "name a run directory on a disk")
    if any(kind.startswith(word) for word in _NETWORK):
        remedy = "clocks and caches of hosts differ: let one host write, and read elsewhere"
        return Check("file system", "ok", f"{text}, shared by hosts", remedy)
    return Check("file system", "ok", text)


def _file_system(place: Path) -> tuple[str, str]:
    """Return type and mount point, from the mount table of Linux; unknown where there is none."""
    try:
        rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown", str(place)
    resolved = place.resolve()
    fitting = [(row[1], row[2]) for row in rows if resolved.is_relative_to(row[1].replace("\\040", " "))]
    mount, kind = max(fitting, key=lambda pair: len(pair[0]), default=(str(place), "unknown"))
    return kind, mount


def sync_seconds(folder: Path) -> float:
    """Return what it takes to make a small new file in a folder durable, median of a few; leaves them there."""
    durations = []
    for i in range(_NUM_SYNCS):
        started = time.perf_counter()
        with open(folder / f"{i}", "wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def parse_sizes(text: str) -> dict[str, int]:
    """Read ``pp=2,dp=2,tp=2``.

    Raises:
        ConfigurationError: it is not that.
    """
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip(): int(size) for name, size in pairs}
    except ValueError as error:
        raise ConfigurationError(
            f"the layout is {text!r}", remedy="name axes with sizes, outermost first: pp=2,dp=2,tp=2"
        ) from error


def check_layout(sizes: Mapping[str, int], world_size: int | None) -> Check:
    """Compare the product of the axes with the number of ranks, if that is known."""
    try:
        layout = ParallelLayout.from_sizes(sizes)
        if world_size is not None:
            layout.require_world_size(world_size)
    except RankfoldError as error:
        return Check("layout", "failed", error.message, error.remedy)
    known = "" if world_size is None else ", as many as there are"
    return Check(
        "layout", "ok", f"{' × '.join(f'{name} {n}' for name, n in sizes.items())}: {prod(sizes.values())} ranks{known}"
    )
