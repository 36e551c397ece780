"""Starts jobs and is the command line; no training process imports this."""

from pathlib import Path

import aggregator

# Importing `aggregator` has already verified its own sibling, `telemetry`.
_OURS = Path(__file__).resolve().parent.parent / "aggregator"
_FOUND = Path(aggregator.__file__ or next(iter(aggregator.__path__))).resolve()
if _OURS not in (_FOUND, _FOUND.parent):
    raise ImportError(
        f"[import_shadowed] Rankfold's package 'aggregator' is shadowed: expected {_OURS}, imported {_FOUND}. "
        "Rename that file or folder, or start from another folder."
    )
