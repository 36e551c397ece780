"""The optimizer step, as seen from its own hooks: the moment at which gradients are final and parameters move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from telemetry.torch_internals import left_out

__all__ = ["OptimizerBoundary"]

Callback = Callable[[Any, frozenset[int]], None]


class OptimizerBoundary:
    """Calls back right before and right after each ``step`` of the given optimizers.

    ``before`` gets the optimizer and the ids of the parameters that it holds at that moment, so parameter groups that
    are added during the run are included. An optimizer that is driven by a closure computes its gradients inside of the
    step; ``after`` is then told, because before it there were none to see.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, before: Callback, after: Callable[[bool], None]) -> None:
        self._optimizers = tuple(optimizers)
        self._before = before
        self._after = after
        self._handles: list[RemovableHandle] = []
        self.num_steps = 0

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that are watched."""
        return self._optimizers

    def __len__(self) -> int:
        return len(self._optimizers)

    def install(self) -> None:
        """Add the hooks; they stay until :meth:`remove`."""
        for optimizer in self._optimizers:
            # A compiled step calls them as they are; they are no part of the computation.
            self._handles.append(optimizer.register_step_pre_hook(left_out(self._on_before)))
            self._handles.append(optimizer.register_step_post_hook(left_out(self._on_after)))

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def _on_before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        self._before(optimizer, frozenset(id(p) for group in optimizer.param_groups for p in group["params"]))

    def _on_after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        self.num_steps += 1
        # args begins with the optimizer itself, as Optimizer.profile_hook_step passes it on.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._after(closure is not None)
