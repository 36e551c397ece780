"""Who listens to call sites: nested scopes, suspension, and the gate that makes a call outside of them cost nothing."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from telemetry.torch_internals import is_recomputing

__all__ = [
    "GATE",
    "Observer",
    "close_gate",
    "deliver",
    "explicit_scope",
    "is_open",
    "join",
    "leave",
    "open_gate",
    "suspended",
]

Observer = Callable[[object, str, str, Tensor, "int | None", "int | None", "int | None"], None]
"""Called with owner, name, source kind, tensor, tp dim, sequence dim and batch dim, by position."""


class _Gate:
    """What call sites look at first.

    Attributes:
        kinds: source kinds that some scope of the process listens to.
        traced_kinds: the same for code that is being compiled; empty where torch cannot serve it. A Python value, so a
            graph that was compiled under one value is left for another when it changes.
    """

    __slots__ = ("kinds", "traced_kinds")

    def __init__(self) -> None:
        self.kinds: frozenset[str] = frozenset()
        self.traced_kinds: frozenset[str] = frozenset()


GATE: Final = _Gate()


@dataclass(frozen=True)
class _Scope:
    listeners: tuple[tuple[Observer, frozenset[str]], ...]
    is_explicit: bool


class _SuspensionOfThread(threading.local):
    depth = 0


_scope: Final[ContextVar[_Scope | None]] = ContextVar("rankfold_scope", default=None)
_suspended: Final[ContextVar[bool]] = ContextVar("rankfold_suspended", default=False)
# A checkpoint may restore the context of its forward around the recomputation, and with it a context variable that
# says "not suspended". What the thread says stands above that.
_of_thread: Final = _SuspensionOfThread()
_opened: Final[list[tuple[frozenset[str], bool]]] = []
_opening: Final = threading.Lock()


def open_gate(kinds: frozenset[str], *, traced: bool) -> None:
    """Let calls of these kinds through, in compiled code as well if ``traced``; once for each :func:`close_gate`."""
    with _opening:
        _opened.append((kinds, traced))
        _set_gate()


def close_gate(kinds: frozenset[str], *, traced: bool) -> None:
    """Take back one :func:`open_gate` of the same arguments."""
    with _opening:
        _opened.remove((kinds, traced))
        _set_gate()


def _set_gate() -> None:
    GATE.kinds = frozenset[str]().union(*(kinds for kinds, _ in _opened))
    GATE.traced_kinds = frozenset[str]().union(*(kinds for kinds, traced in _opened if traced))


@contextmanager
def explicit_scope(observer: Callable[..., None], source_kinds: Iterable[str], *, traced: bool) -> Iterator[None]:
    """Make ``observer`` the only listener for the block."""
    kinds = frozenset(source_kinds)
    token = _scope.set(_Scope(((_with_seven_arguments(observer), kinds),), is_explicit=True))
    open_gate(kinds, traced=traced)
    try:
        yield
    finally:
        close_gate(kinds, traced=traced)
        _scope.reset(token)


def join(observer: Observer, kinds: frozenset[str]) -> None:
    """Listen beside other sessions, from now on; an explicit scope that is open keeps the calls to itself."""
    scope = _scope.get()
    if scope is None or not scope.is_explicit:
        listeners = scope.listeners if scope is not None else ()
        _scope.set(_Scope((*listeners, (observer, kinds)), is_explicit=False))


def leave(observer: Observer) -> None:
    """Listen no longer."""
    scope = _scope.get()
    if scope is not None and not scope.is_explicit:
        listeners = tuple(pair for pair in scope.listeners if pair[0] is not observer)
        _scope.set(_Scope(listeners, is_explicit=False) if listeners else None)


@contextmanager
def suspended() -> Iterator[None]:
    """Deliver nothing from inside of the block, and nothing from a copy of its context."""
    token = _suspended.set(True)
    _of_thread.depth += 1
    try:
        yield
    finally:
        _of_thread.depth -= 1
        _suspended.reset(token)


def is_open(source_kind: str) -> bool:
    """Tell whether a call of this kind would reach somebody here and now."""
    scope = _scope.get()
    if source_kind not in GATE.kinds or scope is None or _of_thread.depth or _suspended.get():
        return False
    return any(source_kind in kinds for _, kinds in scope.listeners) and not is_recomputing()


def deliver(
    owner: object,
    name: str,
    source_kind: str,
    tensor: Tensor,
    tp_shard_dim: int | None,
    sequence_dim: int | None,
    batch_dim: int | None,
) -> None:
    """Hand one tensor to whoever listens."""
    if is_open(source_kind):
        scope = _scope.get()
        for observer, kinds in scope.listeners if scope is not None else ():
            if source_kind in kinds:
                observer(owner, name, source_kind, tensor, tp_shard_dim, sequence_dim, batch_dim)


def _with_seven_arguments(observer: Callable[..., None]) -> Observer:
    """Return an observer for today's calls; those of older Megatron take five arguments."""
    try:
        parameters = inspect.signature(observer)
        parameters.bind(*range(7))
    except TypeError:
        return _dropping_dims(observer)
    except ValueError:  # a builtin that tells nothing of its arguments
        return observer
    return observer


def _dropping_dims(observer: Callable[..., None]) -> Observer:
    def observe(*arguments: Any) -> None:
        observer(*arguments[:5])

    return observe
