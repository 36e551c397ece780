"""Starts jobs and is the command line; no training process imports this."""

from importlib.util import find_spec
from pathlib import Path

# Found and not imported: that would load torch before the command line knows whether it needs it. Importing
# `aggregator` verifies its own sibling, `telemetry`.
_OURS = Path(__file__).resolve().parent.parent / "aggregator"
_SPEC = find_spec("aggregator")
_PLACES = [] if _SPEC is None else [_SPEC.origin or "", *(_SPEC.submodule_search_locations or [])]
_FOUND = [Path(place).resolve() for place in _PLACES if place]
if not any(_OURS in (place, place.parent) for place in _FOUND):
    raise ImportError(
        f"[import_shadowed] Rankfold's package 'aggregator' is shadowed: expected {_OURS}, found {_FOUND or 'none'}. "
        "Rename that file or folder, or start from another folder."
    )
