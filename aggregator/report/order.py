"""The order of a model's parts from input to output, as far as names and the order of execution tell it."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["depth_order", "shortened"]

_NUMBER = re.compile(r"(\d+)")


def depth_order(names: Sequence[str], executed: Sequence[str]) -> list[str]:
    """Return ``names`` from input to output.

    Parts in numbered layers follow each other by the number of the layer, and within a layer as they ran. Parts
    outside of layers stand in front of them if they ran before the first one, else behind. A parameter stands where its
    module does. Where nothing is known to have run, names are compared with numbers as numbers.

    Args:
        names: any names of sites, each once.
        executed: names of activations in the order in which they were first seen; may be empty.
    """
    ran = {name: place for place, name in enumerate(executed)}
    layered = [name for name in (*executed, *names) if _layer(name) is not None]
    first = layered[0] if layered else ""

    def key(name: str) -> tuple[object, ...]:
        module, layer = _module(name, ran), _layer(name)
        place = ran.get(module, len(ran))
        if layer is not None:
            return 1, layer, place, _natural(name)
        begins = place < ran[first] if module in ran and first in ran else _natural(name) < _natural(first)
        return 0 if begins else 2, 0, place, _natural(name)

    return sorted(names, key=key)


def shortened(name: str, max_length: int = 36) -> str:
    """Return the name with its middle left out, so that it has at most ``max_length`` characters."""
    if len(name) <= max_length:
        return name
    head = (max_length - 1) // 3
    return f"{name[:head]}…{name[len(name) - (max_length - 1 - head) :]}"


def _module(name: str, ran: dict[str, int]) -> str:
    """Return the longest leading part of the name that ran, or the name."""
    part = name
    while part not in ran and "." in part:
        part = part.rpartition(".")[0]
    return part if part in ran else name


def _layer(name: str) -> int | None:
    return next((int(segment) for segment in name.split(".") if segment.isdecimal()), None)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in _NUMBER.split(name) if part)
