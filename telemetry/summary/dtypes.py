"""Which dtypes have a summary, and the code that the C kernel knows each one by."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

from telemetry.errors import DtypeUnsupportedError

__all__ = ["DTYPE_CODES", "ITEM_SIZES", "REDUCTION_DTYPE", "dtype_code"]

REDUCTION_DTYPE: Final = "float64"

# In the order of `enum dtype` in kernel.h. Some of them are younger than the oldest torch that is supported.
_NAMES: Final = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
)
DTYPE_CODES: Final = MappingProxyType(
    {getattr(torch, name): code for code, name in enumerate(_NAMES) if hasattr(torch, name)}
)

# By code; a tensor at an address that its item size does not divide cannot be read in place.
ITEM_SIZES: Final = (8, 4, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 4, 8, 8)


def dtype_code(dtype: torch.dtype) -> int:
    """Return the kernel's code of a dtype.

    Raises:
        DtypeUnsupportedError: the dtype is complex, quantized or packed.
    """
    code = DTYPE_CODES.get(dtype)
    if code is None:
        remedy = (
            "observe its real and imaginary parts or its absolute value" if dtype.is_complex else "convert it first"
        )
        raise DtypeUnsupportedError(
            f"a tensor of dtype {dtype} has no summary; accepted are "
            + ", ".join(str(accepted).removeprefix("torch.") for accepted in DTYPE_CODES),
            remedy=remedy,
        )
    return code
