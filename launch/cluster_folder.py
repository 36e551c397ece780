"""Where the files of ``cluster/`` are: beside the packages in a checkout, inside ``launch`` in an installed wheel."""

from __future__ import annotations

from pathlib import Path

__all__ = ["cluster_folder"]


def cluster_folder() -> Path:
    """Return the folder."""
    here = Path(__file__).resolve().parent
    packaged = here / "cluster_files"
    return packaged if packaged.is_dir() else here.parent / "cluster"
