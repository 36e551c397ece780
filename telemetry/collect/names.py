"""Canonical names: what a module or parameter is called whatever it is wrapped in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from torch import nn

__all__ = ["NamedParameter", "canonical_name", "module_census", "named_modules", "named_parameters", "unwrapped"]

# Names of the attribute under which DDP, torch.compile, FSDP1 and the checkpoint wrapper keep what they wrap.
_WRAPPER_SEGMENTS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# A tag must be legal in every tracker, so a name keeps to the alphabet that all of them share.
_ILLEGAL: Final = re.compile(r"[^A-Za-z0-9_.:\-]")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def canonical_name(path: str) -> str:
    """Drop the segments that wrappers add, and replace characters that trackers refuse."""
    kept = ".".join(part for part in path.split(".") if part not in _WRAPPER_SEGMENTS)
    return _ILLEGAL.sub("_", kept)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Yield (name, module, aliases) of every module below the unwrapped model, each module once.

    A model without submodules is itself the one site, under the name of its class.
    """
    names: dict[nn.Module, list[str]] = {}
    for path, module in unwrapped(model).named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(canonical_name(path))
    if len(names) == 1:
        yield type(unwrapped(model)).__name__, unwrapped(model), ()
    for module, (name, *rest) in names.items():
        if name:
            yield name, module, tuple(alias for alias in dict.fromkeys(rest) if alias != name)


NamedParameter = tuple[str, nn.Parameter, tuple[str, ...]]


def named_parameters(model: nn.Module) -> Iterator[NamedParameter]:
    """Yield (name, parameter, aliases) of every parameter, each tied one once under its first name."""
    names: dict[nn.Parameter, list[str]] = {}
    for path, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(canonical_name(path))
    for parameter, (name, *rest) in names.items():
        yield name, parameter, tuple(rest)


def module_census(model: nn.Module) -> str:
    """Say how many modules of each class there are, with an example of each, for a refusal."""
    classes: Counter[str] = Counter()
    example: dict[str, str] = {}
    for name, module, _ in named_modules(model):
        kind = type(module).__name__
        classes[kind] += 1
        example.setdefault(kind, name)
    rows = [f"{count} {kind} (such as {example[kind]!r})" for kind, count in classes.most_common(12)]
    return ", ".join(rows) or "no submodules"
