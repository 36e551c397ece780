"""Names in a run directory: what ``history.v1`` calls its files, and how to find them.

::

    RUN/manifest.json                    the run; its publication creates the run
    RUN/seg-00000/                       one incarnation of the writer; mkdir is the claim
        segment.json                     the segment; without it the claim was never taken up
        index-00000042.arrow             the newest generation is the snapshot
        c/00000017.arrow                 level 0: the tables of commit 17
        c/L1-00000000-00000063.parquet   level 1: the observations of commits 0 to 63, sorted by site
        c/L1-00000000-00000063.arrow     their other tables, and the checksums of the Parquet file
        c/L2-...                         level 2: several files of level 1
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = [
    "CHUNK_FOLDER",
    "CLAIM_SUFFIX",
    "FORMAT",
    "MANIFEST",
    "SEGMENT",
    "TEMPORARY_PREFIX",
    "VERSION",
    "chunk_name",
    "claimed_generations",
    "generations",
    "index_name",
    "is_chunk_name",
    "segment_folder",
    "segment_numbers",
]

FORMAT: Final = "history.v1"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
SEGMENT: Final = "segment.json"
CHUNK_FOLDER: Final = "c"
TEMPORARY_PREFIX: Final = ".unpublished-"
CLAIM_SUFFIX: Final = ".claim"

_SEGMENT_PATTERN: Final = re.compile(r"seg-(\d{5,})")
_CHUNK_PATTERN: Final = re.compile(CHUNK_FOLDER + r"/(\d{8,}\.arrow|L\d-\d{8,}-\d{8,}\.(arrow|parquet))")
_INDEX_PATTERN: Final = re.compile(r"index-(\d{8,})\.arrow")


def segment_folder(run: Path, segment: int) -> Path:
    """Return the folder of a segment."""
    return run / f"seg-{segment:05d}"


def index_name(generation: int) -> str:
    """Return the file name of an index generation."""
    return f"index-{generation:08d}.arrow"


def chunk_name(seq_lo: int, seq_hi: int, level: int = 0, suffix: str = "arrow") -> str:
    """Return the path, inside the segment, of the file that holds commits ``seq_lo`` to ``seq_hi``."""
    span = f"L{level}-{seq_lo:08d}-{seq_hi:08d}" if level else f"{seq_lo:08d}"
    return f"{CHUNK_FOLDER}/{span}.{suffix}"


def is_chunk_name(name: str) -> bool:
    """Tell whether a path inside a segment is one that :func:`chunk_name` gives."""
    return _CHUNK_PATTERN.fullmatch(name) is not None


def segment_numbers(run: Path) -> list[int]:
    """Return the numbers of all claimed segments, ascending."""
    return sorted(int(found[1]) for entry in run.iterdir() if (found := _SEGMENT_PATTERN.fullmatch(entry.name)))


def generations(segment: Path) -> list[int]:
    """Return the index generations that are there, ascending."""
    return sorted(int(found[1]) for entry in segment.iterdir() if (found := _INDEX_PATTERN.fullmatch(entry.name)))


def claimed_generations(segment: Path) -> list[int]:
    """Return the index generations that somebody has claimed, whether they are there or not, ascending."""
    names = (entry.name.removesuffix(CLAIM_SUFFIX) for entry in segment.iterdir() if entry.name.endswith(CLAIM_SUFFIX))
    return sorted(int(found[1]) for name in names if (found := _INDEX_PATTERN.fullmatch(name)))
