"""The generations of an index as the fence between a writer and its successor.

Whoever publishes a generation first has it. With links that is all. With claims, a writer can be overtaken between its
claim and its rename; so it looks, after the rename, whether the next generation has been claimed, and then does not
acknowledge. The successor claims first and reads the newest index after that: either the writer sees the claim, or the
successor sees what the writer has published.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from aggregator.history.index import Index
from aggregator.history.layout import claimed_generations, index_name
from aggregator.history.publish import CLAIM, CLAIMED, LINK, claim_name, claim_of, publish, publish_written
from aggregator.history.snapshot import newest_index

__all__ = ["publish_generation", "seal"]

_NOTHING: Final = Index(-1, False, None, None, 0, ())


def publish_generation(folder: Path, index: Index, way: str) -> None:
    """Publish the next generation of one's own segment, and remove the one before the one before.

    Raises:
        FileExistsError: a successor has sealed the segment; nothing may be acknowledged.
        OSError: the file system refused.
    """
    publish(folder / index_name(index.generation), index.to_bytes(), way)
    if way == CLAIM and claim_of(folder / index_name(index.generation + 1)).exists():
        raise FileExistsError(f"generation {index.generation + 1} of {folder} is claimed")
    # The generation before stays for readers that have just listed it.
    outdated = folder / index_name(index.generation - 2)
    with suppress(OSError):
        outdated.unlink()
    if way == CLAIM:
        with suppress(OSError):
            claim_of(outdated).rmdir()


def seal(folder: Path, way: str) -> None:
    """Publish a last generation of a predecessor's segment; tries again while its writer still publishes ahead of us.

    Raises:
        HistoryDamagedError: the newest index is damaged.
        OSError: the file system refused.
    """
    # Looked at again after each try: a writer that is faster than we are may have published, and removed again, the
    # generation that we have just taken; then the newest one is still its own.
    while not (newest_index(folder) or _NOTHING).sealed:
        with suppress(FileExistsError):
            _publish_seal(folder, way)


def _publish_seal(folder: Path, way: str) -> None:
    newest = newest_index(folder) or _NOTHING
    if way == LINK:
        sealed = replace(newest, generation=newest.generation + 1, sealed=True)
        publish(folder / index_name(sealed.generation), sealed.to_bytes(), way)
        return
    generation = max([newest.generation, *claimed_generations(folder)]) + 1
    path = folder / index_name(generation)
    claim_name(path)
    # Read again: what was published before our claim stood is part of what we seal.
    newest = newest_index(folder) or _NOTHING
    if not newest.sealed:
        sealed = replace(newest, generation=generation, sealed=True)
        publish_written(path, lambda temporary: temporary.write_bytes(sealed.to_bytes()), CLAIMED)
