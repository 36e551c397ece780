"""The optimizer step, as seen from its own hooks: the moment at which gradients are final and parameters move."""

from __future__ import annotations

import functools
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
    step, and those that lie there are of the step before: ``before`` then comes when the closure has returned for
    the first time, which is before anything moves. ``after`` is told, because a closure need not have been called.
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

    def _on_before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]
    ) -> tuple[tuple[Any, ...], dict[Any, Any]] | None:
        closure = _closure(args, kwargs)
        if closure is None:
            self._before(optimizer, _parameter_ids(optimizer))
            return None
        is_first = True

        @functools.wraps(closure)
        def observed(*inputs: Any, **named: Any) -> Any:
            nonlocal is_first
            result = closure(*inputs, **named)
            if is_first:
                is_first = False
                self._before(optimizer, _parameter_ids(optimizer))
            return result

        return ((*args[:1], observed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": observed})

    def _on_after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        self.num_steps += 1
        self._after(_closure(args, kwargs) is not None)


def _closure(args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Callable[..., Any] | None:
    # args begins with the optimizer itself, as Optimizer.profile_hook_step passes it on.
    given: Callable[..., Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return given


def _parameter_ids(optimizer: Optimizer) -> frozenset[int]:
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
