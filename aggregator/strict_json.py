"""JSON that every parser reads: no NaN, no infinity, keys in a fixed order."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["to_strict_json", "without_nonfinite"]


def to_strict_json(value: Any) -> str:
    """Serialise on one line; a float without a finite value becomes null.

    Raises:
        TypeError: a value has no JSON form.
    """
    return json.dumps(without_nonfinite(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def without_nonfinite(value: Any) -> Any:
    """Return plain dictionaries, lists and numbers; a float without a finite value becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nonfinite(item) for item in value]
    return value
