"""Which models have a live session, so that no model is watched twice under one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

from torch import nn

from telemetry.collect.names import unwrapped
from telemetry.errors import ModelAlreadyWatchedError

__all__ = ["claim_model", "release_model"]

_LIVE: Final[WeakKeyDictionary[nn.Module, set[str]]] = WeakKeyDictionary()


def claim_model(chunks: Sequence[nn.Module], name: str) -> None:
    """Enter a session of this name for the model's chunks.

    Raises:
        ModelAlreadyWatchedError: one of them has such a session.
    """
    models = [unwrapped(chunk) for chunk in chunks]
    for model in models:
        if name in _LIVE.get(model, ()):
            raise ModelAlreadyWatchedError(
                f"the model ({type(model).__name__}) already has a live session called {name!r}",
                remedy="close that session first, or give this one another name: watch(…, name=…)",
            )
    for model in models:
        _LIVE.setdefault(model, set()).add(name)


def release_model(chunks: Sequence[nn.Module], name: str) -> None:
    """Take the session of this name off the model's list."""
    for chunk in chunks:
        _LIVE.get(unwrapped(chunk), set()).discard(name)
