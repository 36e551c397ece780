"""The reference of the exactness gates: whole tensors gathered from all ranks, and summarised in one process.

Nothing of it goes through the record's own way. Outputs of modules and their gradients are copied by hooks of its own,
whole tensors come together by the job's collectives, and one process summarises them in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from telemetry.summary import TensorSummary, summarize

__all__ = ["GatheredReference", "Join", "Key", "Reference", "gather_parts", "take_first", "whole"]

Key = tuple[int, str, str]
"""Step, kind and site."""

Join = Callable[[Tensor], Tensor]
"""Turns a rank's part of a tensor into all elements that count, flat, on every rank; all ranks enter."""


def gather_parts(part: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the elements of all ranks of a group, flat, in the order of ranks; parts may differ in size."""
    flat = part.detach().contiguous().view(-1)
    size = torch.tensor([flat.numel()], device=flat.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    largest = int(torch.cat(sizes).max())
    padded = torch.cat((flat, flat.new_zeros(largest - flat.numel())))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([one[: int(n)] for one, n in zip(parts, sizes, strict=True)])


def take_first(part: Tensor) -> Tensor:
    """Return the elements as they are: every rank holds the same ones."""
    return part.detach().contiguous().view(-1)


class Reference:
    """Summaries of whole tensors, made on rank zero.

    Attributes:
        summaries: of all tensors so far; empty on other ranks.
    """

    def __init__(self) -> None:
        self.summaries: dict[Key, TensorSummary] = {}

    def add(self, key: Key, whole: Tensor) -> None:
        """Summarise all elements of an observation, on any device."""
        if dist.get_rank() == 0:
            self.summaries[key] = summarize(whole.detach().cpu().double(), histogram=True)


class GatheredReference(Reference):
    """Collects what one process would have seen. Every rank makes one, and calls every method in the same order."""

    def __init__(self, model: nn.Module, joins: Mapping[str, Join] | None = None) -> None:
        """Set up to hook every module of ``model`` that has a forward of its own.

        Args:
            model: without a wrapper.
            joins: how the parts of a module's output come together, by name of the module; of modules that are not
                named, the parts of all ranks are gathered.
        """
        super().__init__()
        self._model = model
        self._joins = dict(joins or {})
        self._seen: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._handles: list[RemovableHandle] = []
        self._before: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """Hook the modules; called before the first forward of a step."""
        for name, module in self._model.named_modules():
            if name and not isinstance(module, nn.ModuleList):
                self._handles.append(module.register_forward_hook(self._hook(name)))

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self._seen["activation", name].append(output.detach().clone())
            output.register_hook(lambda gradient: self._seen["activation_grad", name].append(gradient.detach().clone()))

        return keep

    def before_update(self) -> None:
        """Keep the parameters, whole; called when gradients are final and the optimizer has not stepped."""
        self._before = {name: whole(parameter) for name, parameter in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None, "every parameter of the model takes part in the loss"
            self._seen["gradient", name].append(whole(parameter.grad))

    def end_step(self, step: int) -> None:
        """Gather, and on rank zero summarise, what the step has shown; called after the optimizer step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for kind, name in sorted(self._seen):
            join = self._joins.get(name, gather_parts) if kind.startswith("activation") else take_first
            self.add((step, kind, name), torch.cat([join(_local(part)) for part in self._seen[kind, name]]))
        for name, parameter in self._model.named_parameters():
            after = whole(parameter)
            self.add((step, "parameter", name), after)
            self.add((step, "update", name), after.double() - self._before[name].double())
        self._seen.clear()


def whole(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor, of a DTensor those of all ranks, which then all enter."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def _local(part: Tensor) -> Tensor:
    return part.to_local() if isinstance(part, DTensor) else part
