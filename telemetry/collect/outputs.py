"""The tensors inside of whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]


def tensors_in(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for each tensor in nested tuples, lists, mappings and dataclasses, in their own order.

    The path of a bare tensor is "", that of a nested one joins indices, keys and field names with dots: ``1.hidden``.
    """
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from tensors_in(value, _join(path, str(key)))
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        for name, value in zip(output._fields, output, strict=True):
            yield from tensors_in(value, _join(path, name))
    elif isinstance(output, tuple | list):
        for index, value in enumerate(output):
            yield from tensors_in(value, _join(path, str(index)))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name, None), _join(path, field.name))


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part
