"""How often the host waits for the device in a block: as CUDA counts, or on a CPU by what would make it wait."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["beyond", "count_waits"]

# Operators that make the host wait for an accelerator, or whose output size depends on data.
_WAITING_OPERATORS: Final = frozenset(
    f"aten.{name}.default"
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount")
)
# Methods that bring elements to the host, which on a CPU reach no operator.
_READING_METHODS: Final = frozenset(("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__"))
_SYNC_WARNING: Final = "called a synchronizing CUDA operation"


def count_waits(device: torch.device) -> AbstractContextManager[Counter[str]]:
    """Return a block that fills its counter, by sort, with the waits of the host inside of it.

    On CUDA: warnings of the sync debug mode, and from the profiler every synchronisation of a stream, event or device
    and every copy to the host. On a CPU, where nothing waits: operators and methods that would wait for an accelerator.
    """
    return _on_cuda() if device.type == "cuda" else _on_cpu()


def beyond(observed: Mapping[str, int], unobserved: Mapping[str, int]) -> int:
    """Return by how much the counts exceed others, in the sort where that is most: one wait shows in several sorts."""
    return max((max(0, count - unobserved.get(sort, 0)) for sort, count in observed.items()), default=0)


@contextmanager
def _on_cuda() -> Any:
    waits: Counter[str] = Counter()
    earlier = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    with ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(earlier)
    waits["sync debug mode"] = sum(_SYNC_WARNING in str(warning.message) for warning in caught or ())
    for event in profiler.events() or ():
        if event.name.startswith("cuda") and event.name.endswith("Synchronize"):
            waits[event.name] += 1
        elif "DtoH" in event.name:
            waits["copy to the host"] += 1


@contextmanager
def _on_cpu() -> Any:
    waits: Counter[str] = Counter()
    with _Operators(waits), _Methods(waits):
        yield waits


class _Operators(TorchDispatchMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func) in _WAITING_OPERATORS:
            self._waits[str(func)] += 1
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING_METHODS or (name == "to" and "cpu" in map(str, args[1:])):
            self._waits[name] += 1
        return func(*args, **(kwargs or {}))
