"""Model-wide names: what a module or parameter is called, whatever wraps it and whichever pipeline stage holds it.

Under pipeline parallelism every stage numbers its layers from zero. Three ways lead to a name that is right for the
whole model: the user's rule; the global ``layer_number`` that Megatron gives its layers (counted from 1); and where
there is neither, a prefix with the number of the stage, so that two stages never collide. The local name stays as an
alias.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from torch import nn

__all__ = ["ModelNames", "NameRule", "as_chunks", "legal_name", "unwrapped"]

NameRule = Callable[[str], str]
"""Local name → model-wide name, for modules and parameters alike."""

# Names of the attribute under which torch.compile, FSDP1 and the checkpoint wrapper keep what they wrap.
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


def as_chunks(model: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Return the model chunks of a rank: one, or one for each virtual pipeline stage."""
    return (model,) if isinstance(model, nn.Module) else tuple(model)


class ModelNames:
    """Names everything in the chunks of a rank.

    Args:
        chunks: the rank's model, one chunk for each virtual stage.
        rule: the user's, applied to the local name (with ``model_chunk{i}.`` in front where there are several chunks).
        stage: the rank's pipeline stage where there are several, else None.
    """

    def __init__(self, chunks: Sequence[nn.Module], *, rule: NameRule | None = None, stage: int | None = None) -> None:
        self._chunks = [unwrapped(chunk) for chunk in chunks]
        self._rule = rule
        self._numbered = [_numbered_paths(chunk) for chunk in self._chunks]
        self._stage_prefix = "" if stage is None or any(self._numbered) else f"stage{stage}."

    def modules(self) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
        """Yield (name, module, aliases) of every module below the chunks that has a forward, each module once.

        A chunk without such submodules is itself a site, under the name of its class.
        """
        names: dict[nn.Module, list[str]] = {}
        for index, chunk in enumerate(self._chunks):
            below = [(path, m) for path, m in chunk.named_modules(remove_duplicate=False) if path and _can_run(m)]
            for path, module in below or [(type(chunk).__name__, chunk)]:
                names.setdefault(module, []).extend(self._names(index, path))
        for module, (name, *aliases) in names.items():
            yield name, module, _others(name, aliases)

    def owners(self) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
        """Yield (name, module, aliases) of every module, containers and the chunks themselves included.

        The name of a chunk is "", or what stands in front of the names in it.
        """
        names: dict[nn.Module, list[str]] = {}
        for index, chunk in enumerate(self._chunks):
            for path, module in chunk.named_modules(remove_duplicate=False):
                names.setdefault(module, []).extend(name.rstrip(".") for name in self._names(index, path))
        for module, (name, *aliases) in names.items():
            yield name, module, _others(name, aliases)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, tuple[str, ...], nn.Module]]:
        """Yield (name, parameter, aliases, owning module) of every parameter, a tied one once under its first name."""
        names: dict[nn.Parameter, list[str]] = {}
        owners: dict[nn.Parameter, nn.Module] = {}
        for index, chunk in enumerate(self._chunks):
            modules = dict(chunk.named_modules(remove_duplicate=False))
            for path, parameter in chunk.named_parameters(remove_duplicate=False):
                names.setdefault(parameter, []).extend(self._names(index, path))
                owners.setdefault(parameter, modules[path.rpartition(".")[0]])
        for parameter, (name, *aliases) in names.items():
            yield name, parameter, _others(name, aliases), owners[parameter]

    def census(self) -> str:
        """Say how many modules of each class there are, with an example of each, for a refusal."""
        classes: Counter[str] = Counter()
        example: dict[str, str] = {}
        for name, module, _ in self.modules():
            kind = type(module).__name__
            classes[kind] += 1
            example.setdefault(kind, name)
        rows = [f"{count} {kind} (such as {example[kind]!r})" for kind, count in classes.most_common(12)]
        return ", ".join(rows) or "no submodules"

    def _names(self, index: int, path: str) -> tuple[str, ...]:
        local = _canonical(path)
        in_chunk = f"model_chunk{index}.{local}" if len(self._chunks) > 1 else local
        if self._rule is not None:
            name = legal_name(self._rule(in_chunk))
        elif (numbered := _renumbered(path, self._numbered[index])) is not None:
            name = _canonical(numbered)
        else:
            # Names outside of numbered layers (embedding, final norm) are unique in a model that numbers its layers.
            name = local if self._numbered[index] else self._stage_prefix + in_chunk
        return (name,) if name == local else (name, local)


def legal_name(name: str) -> str:
    """Return a name in which every tracker allows each character."""
    return _ILLEGAL.sub("_", name)


def _can_run(module: nn.Module) -> bool:
    """Tell a module from a mere container, such as a ModuleList."""
    return type(module).forward is not nn.Module.forward


def _canonical(path: str) -> str:
    """Drop the segments that wrappers add, and replace characters that trackers refuse."""
    kept = ".".join(part for part in path.split(".") if part not in _WRAPPER_SEGMENTS)
    return legal_name(kept)


def _others(name: str, aliases: Sequence[str]) -> tuple[str, ...]:
    return tuple(alias for alias in dict.fromkeys(aliases) if alias != name)


def _numbered_paths(chunk: nn.Module) -> dict[str, str]:
    """Return local path → global path of the layers that carry a ``layer_number``."""
    found = {}
    for path, module in chunk.named_modules():
        number = getattr(module, "layer_number", None)
        parent, _, last = path.rpartition(".")
        if last.isdigit() and isinstance(number, int) and not isinstance(number, bool):
            found[path] = f"{parent}.{number - 1}" if parent else str(number - 1)
    return found


def _renumbered(path: str, numbered: dict[str, str]) -> str | None:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        replacement = numbered.get(".".join(parts[:end]))
        if replacement is not None:
            return ".".join([replacement, *parts[end:]])
    return None
