"""All that rests on interfaces which torch does not promise, in one place, so that a change of torch is felt here.

``tests/callsites/test_torch_internals.py`` pins each of them. Where torch lacks what compiled code needs,
:func:`compile_obstacle` says so, the plan shows it, and compiled modules are recorded as unsupported.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

__all__ = [
    "CompiledRegion",
    "HookGuards",
    "add_hook",
    "compile_obstacle",
    "compiled_regions",
    "ddp_obstacle",
    "define_effect",
    "has_compiled",
    "is_compiled",
    "is_fake",
    "is_recomputing",
    "left_out",
    "new_hook_key",
    "only_inline",
    "reading",
    "remove_hook",
]

# Definitions live as long as the library that holds them.
_libraries: Final[list[torch.library.Library]] = []


def is_recomputing() -> bool:
    """Tell whether a backward pass runs this code, as checkpointing in both its modes does with a forward."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _without_modes() -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.no_grad(), _disable_current_modes():
        yield


def reading() -> Any:
    """Return a context in which our own operators leave no trace in autograd or in a dispatch mode.

    A selective checkpoint caches operators in a dispatch mode and counts on meeting the same ones when it recomputes;
    ours run only once.
    """
    return _without_modes() if torch._C._len_torch_dispatch_stack() else torch.no_grad()


def is_fake(tensor: Tensor) -> bool:
    """Tell whether a tensor stands for one without having elements, as during export."""
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def new_hook_key() -> int:
    """Return a key for the hook dictionaries of modules that no other hook of the process has.

    Compiled code guards on the keys of these dictionaries. A hook that comes and goes must come under the same key, or
    each coming would compile again; ``register_forward_hook`` would give it another one every time.
    """
    return int(RemovableHandle(OrderedDict()).id)


def add_hook(module: nn.Module, key: int, hook: Any, *, before: bool) -> None:
    """Add a forward hook, or a forward pre-hook, under a key of ours."""
    (module._forward_pre_hooks if before else module._forward_hooks)[key] = hook


def remove_hook(module: nn.Module, key: int, *, before: bool) -> None:
    """Take it off, if it is there."""
    (module._forward_pre_hooks if before else module._forward_hooks).pop(key, None)


class HookGuards:
    """Makes compiled code notice hooks that come and go, as long as a session lives.

    Torch leaves hooks out of its guards by default. With them, a graph with our hooks and one without exist side by
    side, and each call takes the right one.
    """

    _num_holders = 0
    _before = True

    @staticmethod
    def acquire() -> None:
        """Turn the guards on for all that is compiled from now on."""
        if HookGuards._num_holders == 0:
            import torch._dynamo.config as config

            HookGuards._before = config.skip_nnmodule_hook_guards
            config.skip_nnmodule_hook_guards = False
        HookGuards._num_holders += 1

    @staticmethod
    def release() -> None:
        """Restore what was there, when the last session ends."""
        HookGuards._num_holders -= 1
        if HookGuards._num_holders == 0:
            import torch._dynamo.config as config

            config.skip_nnmodule_hook_guards = HookGuards._before


def compile_obstacle() -> str:
    """Return why this torch cannot show us tensors from inside of compiled code, or "" if it can."""
    try:
        import torch._dynamo.config as config
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    except ImportError as error:
        return f"torch {torch.__version__} lacks effects in compiled graphs: {error}"
    if not hasattr(config, "skip_nnmodule_hook_guards") or not callable(_register_effectful_op):
        return f"torch {torch.__version__} cannot guard compiled graphs on hooks"
    return "" if hasattr(_EffectType, "ORDERED") else f"torch {torch.__version__} knows no ordered effects"


def _is_under_ddp(model: nn.Module) -> bool:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return True
    # A loop may call the wrapper and give us what is inside. Only the wrapper knows of the two, so ask who holds us:
    # its dictionary of modules, which its dictionary of attributes may hold in turn.
    for modules in _dictionaries_that_hold(model):
        if modules.get("module") is model:
            owners = [modules, *_dictionaries_that_hold(modules)]
            # By type, because among all objects there are some that warn when they are asked for their class.
            kinds = {type(holder) for owner in owners for holder in gc.get_referrers(owner)}
            if any(issubclass(kind, DistributedDataParallel) for kind in kinds):
                return True
    return False


def _dictionaries_that_hold(thing: object) -> list[dict[Any, Any]]:
    return [holder for holder in gc.get_referrers(thing) if type(holder) is dict]


def ddp_obstacle(models: Sequence[nn.Module]) -> str:
    """Return why compiled code under DistributedDataParallel cannot show us tensors, or "" if it can.

    Torch cuts graphs that run in a DDP forward at the borders of its buckets, and fails on operators without a result.
    """
    import torch._dynamo.config as config

    # The setting first: to look for wrappers takes a walk over all objects of the process.
    splits_graphs = config.optimize_ddp in (True, "ddp_optimizer")
    if not splits_graphs or not any(_is_under_ddp(model) for model in models):
        return ""
    return (
        "torch splits compiled graphs at the buckets of DistributedDataParallel, and cannot split ours; "
        "set torch._dynamo.config.optimize_ddp = False before watch(…)"
    )


def define_effect(schema: str, implementation: Callable[..., None]) -> None:
    """Define ``rankfold::…``, an operator without a result that compiled graphs keep, in order, in both directions.

    It mutates no argument, so nothing is cloned for it, and it may run in a forward and in a backward graph.
    """
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    name = schema.partition("(")[0]
    library = torch.library.Library("rankfold", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(schema)  # type: ignore[no-untyped-call]
    library.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"rankfold::{name}", _returns_nothing, lib=library)
    _libraries.append(library)
    _register_effectful_op(getattr(torch.ops.rankfold, name).default, _EffectType.ORDERED)


def _returns_nothing(*_: Any) -> None:
    return None


def left_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs as it is, with all that it calls, wherever compiled code comes upon it."""
    wrapped: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return wrapped


def only_inline(function: Callable[..., Any]) -> None:
    """Let a function be traced as a part of what calls it, but never become a graph by itself.

    Otherwise the hooks of an outermost module, and call sites after a graph break, would each be compiled alone.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def has_compiled() -> bool:
    """Tell whether anything was compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0


def is_compiled(models: Sequence[nn.Module]) -> bool:
    """Tell whether a part of the models, or anything else in this process, was compiled."""
    return has_compiled() or any(compiled_regions(model) for model in models)


@dataclass(frozen=True)
class CompiledRegion:
    """A compiled part of a model.

    Attributes:
        root: the module whose call was compiled; its own hooks may run outside of the graph.
        inside: all modules below it.
    """

    root: nn.Module
    inside: tuple[nn.Module, ...]


def compiled_regions(model: nn.Module) -> list[CompiledRegion]:
    """Return the compiled parts of a model."""
    regions = []
    for module in model.modules():
        inner = getattr(module, "_orig_mod", None)
        root = inner if isinstance(inner, nn.Module) else module
        if root is not module or module._compiled_call_impl is not None:
            regions.append(CompiledRegion(root, tuple(below for below in root.modules() if below is not root)))
    return regions
