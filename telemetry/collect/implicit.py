"""Steps of a loop that cannot be changed: told apart by a number that a callable returns at each forward pass.

A step begins with the first forward pass for which the callable returns a new number, and ends where the next one
begins or the session closes. All forward passes of one number are micro-batches of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from telemetry.torch_internals import is_recomputing

if TYPE_CHECKING:
    from telemetry.collect.session import Session, StepScope

__all__ = ["ImplicitSteps", "StepSource"]

StepSource = Callable[[], int]
"""Returns the number of the optimizer step that the coming forward pass belongs to, the same on every rank."""


def _inert(*_: Any) -> None:
    return None


def _make_inert() -> Callable[..., None]:
    return _inert


class _CountingHook:
    """A forward pre-hook that neither pickles nor copies: what does is a function without effect."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._call()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_inert, ()


class ImplicitSteps:
    """Opens and closes the step scopes of a session from a hook on the model's forward.

    Attributes:
        num_forwards: forward passes of the step, counted here because the scope opens inside of the first of them.
        num_passed_over: forward passes whose number repeated an earlier step or went back; they are not recorded.
        failure: what the callable raised, or ""; after that no further step is opened.
    """

    def __init__(self, session: Session, root: nn.Module, source: StepSource) -> None:
        self.num_forwards = 0
        self.num_passed_over = 0
        self.failure = ""
        self._session = session
        self._source = source
        self._number: int | None = None
        self._scope: StepScope | None = None
        self._handle = root.register_forward_pre_hook(_CountingHook(self._on_forward))

    def close(self, *, record: bool) -> None:
        """Take the hook off and end the open step; ``record`` tells whether it counts or is abandoned."""
        self._handle.remove()
        self._end(record=record)

    def _on_forward(self) -> None:
        if self.failure or is_recomputing():
            return
        try:
            number = int(self._source())
        except Exception as error:  # a user's callable must not end the training it only counts
            self.failure = f"{type(error).__name__}: {error}"
            self._end(record=False)
            return
        if number == self._number:
            self.num_forwards += 1
            return
        self._end(record=True)
        self._number, self.num_forwards = number, 1
        if self._session.can_open(number):
            self._scope = self._session.step(number)
            self._scope.__enter__()
        else:
            self.num_passed_over += 1

    def _end(self, *, record: bool) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            error = None if record else RuntimeError("abandoned")
            scope.__exit__(type(error) if error else None, error, None)
