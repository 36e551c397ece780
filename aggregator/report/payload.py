"""Arrays as a page carries them: float32 rounded for display, byte planes apart, gzip, base64.

Numbers on the page are for the eye: they keep 13 bits of mantissa, four significant digits. The record has the rest.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["packed_bytes", "packed_floats", "packed_text", "script_json", "skeleton"]

_DROPPED_BITS: Final = 10
# What the page fills in itself.
_FILLED: Final = ("x", "y", "z", "text", "customdata")


def packed_floats(values: NDArray[np.float64]) -> str:
    """Return float64 values as text: relative error below 2^-14, NaN and ±inf kept, beyond float32 ±inf."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    is_number = np.isfinite(
        values.astype(np.float32, copy=False) if values.dtype == np.float32 else bits.view(np.float32)
    )
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    rounded = (bits + half) & ~np.uint32((1 << _DROPPED_BITS) - 1)
    kept = np.where(is_number, rounded, np.where(np.isnan(bits.view(np.float32)), np.uint32(0x7FC00000), bits))
    planes = kept.astype("<u4").reshape(-1).view(np.uint8).reshape(-1, 4).T
    return packed_bytes(np.ascontiguousarray(planes))


def packed_bytes(values: NDArray[np.uint8]) -> str:
    """Return bytes as text."""
    return packed_text(values.tobytes())


def packed_text(data: bytes, level: int = 6) -> str:
    """Return bytes, gzipped, as base64; the same bytes for the same data."""
    return base64.b64encode(gzip.compress(data, level, mtime=0)).decode("ascii")


def script_json(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in; NaN refuses."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def skeleton(figure: Any) -> dict[str, Any]:
    """Return a plotly figure as JSON-serialisable dictionary without the arrays that the page fills in."""
    drawn: dict[str, Any] = json.loads(figure.to_json())
    for trace in drawn["data"]:
        for name in _FILLED:
            trace.pop(name, None)
    drawn["layout"].pop("template", None)
    return drawn
