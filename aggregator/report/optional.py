"""Libraries that only drawing needs: imported where it happens, with the install command where they are absent."""

from __future__ import annotations

import importlib
from types import ModuleType

from telemetry.errors import ReportUnavailableError

__all__ = ["required"]


def required(module: str) -> ModuleType:
    """Import a module of an optional library.

    Raises:
        ReportUnavailableError: it is not installed.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReportUnavailableError(
            f"a report is drawn with {library}, which cannot be imported: {error}",
            remedy="pip install 'rankfold[report]'",
        ) from error
