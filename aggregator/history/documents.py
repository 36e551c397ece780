"""The immutable JSON documents of a run, each sealed with the hash of its own body: manifest and segment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aggregator.history.publish import LINK, publish
from aggregator.strict_json import to_strict_json
from telemetry.errors import ConfigurationError, HistoryDamagedError

__all__ = ["publish_document", "read_document"]


def publish_document(path: Path, body: Mapping[str, Any], way: str = LINK) -> None:
    """Publish ``{"body": ..., "sha256": ...}``.

    Raises:
        ConfigurationError: the body has a value that JSON cannot hold.
        FileExistsError, OSError: see :func:`aggregator.history.publish.publish`.
    """
    try:
        canonical = to_strict_json(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the run record is not JSON: {error}", remedy="put only strings, numbers, lists and mappings into it"
        ) from error
    publish(path, _sealed(canonical), way)


def read_document(path: Path) -> dict[str, Any]:
    """Return the body.

    Raises:
        FileNotFoundError: there is no such document.
        HistoryDamagedError: its bytes are not what was written.
    """
    data = path.read_bytes()
    try:
        body = json.loads(data)["body"]
        # Compared byte by byte, so that not even a damaged space goes unseen.
        intact = isinstance(body, dict) and data == _sealed(to_strict_json(body))
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise HistoryDamagedError(
            f"{path} is damaged: its content does not have the hash it was written with",
            remedy="restore the file from a copy; no step can be read without it",
        )
    found: dict[str, Any] = body
    return found


def _sealed(canonical: str) -> bytes:
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return f'{{"body": {canonical},\n"sha256": "{digest}"}}\n'.encode()
