"""Who listens in on TensorBoard's writers: tools that patch them to copy what is written to a server of their own.

wandb (``sync_tensorboard=True``) and clearml do. A relay counts steps in its own way and re-bins histograms that have
uneven edges, so the copy would not be what was written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["relays"]

_THEIRS: Final = frozenset({"tensorboard", "torch", "tensorflow"})
_MODULES: Final = ("torch.utils.tensorboard.writer", "tensorboard.summary.writer.event_file_writer")
_CLASSES: Final = ("SummaryWriter", "FileWriter", "EventFileWriter")
_METHODS: Final = ("__init__", "add_event", "add_summary", "add_histogram_raw")


def relays() -> tuple[str, ...]:
    """Return the packages that have put code of their own into TensorBoard's writers in this process.

    Looks only at what is imported already: a relay patches a module that it has loaded.
    """
    modules = [module for name in _MODULES if (module := sys.modules.get(name)) is not None]
    return tuple(sorted({package for module in modules for package in _packages(module)} - _THEIRS))


def _packages(module: Any) -> Iterator[str]:
    classes = [found for name in _CLASSES if (found := getattr(module, name, None)) is not None]
    for writer in classes:
        yield writer.__module__.partition(".")[0]
        for method in filter(None, (getattr(writer, name, None) for name in _METHODS)):
            # A wrapper may carry the name of what it wraps, but its globals are those of the module that made it.
            yield getattr(method, "__globals__", {}).get("__name__", "torch").partition(".")[0]
