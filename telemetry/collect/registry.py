"""Which models have a live session, so that no model is watched twice under one name."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from torch import nn

from telemetry.collect.names import unwrapped
from telemetry.errors import ModelAlreadyWatchedError

__all__ = ["claim_model", "release_model"]

_LIVE: Final[WeakKeyDictionary[nn.Module, set[str]]] = WeakKeyDictionary()


def claim_model(model: nn.Module, name: str) -> None:
    """Enter a session of this name for the model.

    Raises:
        ModelAlreadyWatchedError: there is one.
    """
    names = _LIVE.setdefault(unwrapped(model), set())
    if name in names:
        raise ModelAlreadyWatchedError(
            f"the model ({type(unwrapped(model)).__name__}) already has a live session called {name!r}",
            remedy="close that session first, or give this one another name: watch(…, name=…)",
        )
    names.add(name)


def release_model(model: nn.Module, name: str) -> None:
    """Take the session of this name off the model's list."""
    _LIVE.get(unwrapped(model), set()).discard(name)
