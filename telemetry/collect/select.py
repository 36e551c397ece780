"""Which modules and parameters a session looks at."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from telemetry.errors import ConfigurationError

__all__ = ["Selection", "Selector", "matches"]

Selector = str | re.Pattern[str] | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A name glob, a compiled regular expression (searched), a module class, or a predicate of (name, module)."""


def matches(selector: Selector, name: str, module: nn.Module) -> bool:
    """Tell whether one selector takes the module called ``name``."""
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    if isinstance(selector, re.Pattern):
        return selector.search(name) is not None
    if isinstance(selector, type):
        return isinstance(module, selector)
    return bool(selector(name, module))


class Selection:
    """The user's ``select`` and ``exclude``, checked once and then asked for each module and parameter.

    A parameter is taken if its own name matches, or the module that owns it is taken; the same for exclusion.
    """

    def __init__(self, select: Selector | Sequence[Selector], exclude: Selector | Sequence[Selector] = ()) -> None:
        self._select = _as_selectors("select", select)
        self._exclude = _as_selectors("exclude", exclude)

    def takes_module(self, name: str, module: nn.Module) -> bool:
        """Tell whether the module is observed."""
        if any(matches(selector, name, module) for selector in self._exclude):
            return False
        return any(matches(selector, name, module) for selector in self._select)

    def takes_parameter(self, name: str, owner: nn.Module) -> bool:
        """Tell whether the parameter called ``name`` of the module ``owner`` is observed."""
        owner_name = name.rpartition(".")[0]
        if any(matches(s, n, owner) for s in self._exclude for n in (name, owner_name)):
            return False
        return any(matches(s, n, owner) for s in self._select for n in (name, owner_name))

    def __str__(self) -> str:
        text = ", ".join(_describe(selector) for selector in self._select)
        return f"{text} without {', '.join(map(_describe, self._exclude))}" if self._exclude else text


def _as_selectors(argument: str, given: Selector | Sequence[Selector]) -> tuple[Selector, ...]:
    selectors = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for selector in selectors:
        is_module_class = isinstance(selector, type) and issubclass(selector, nn.Module)
        is_known = isinstance(selector, str | re.Pattern) or is_module_class
        if not is_known and (isinstance(selector, type) or not callable(selector)):
            raise ConfigurationError(
                f"{argument} holds {selector!r}, which selects nothing",
                remedy="give a name glob, a compiled regular expression, a module class or a predicate (name, module)",
            )
    return selectors


def _describe(selector: Selector) -> str:
    if isinstance(selector, str):
        return repr(selector)
    if isinstance(selector, re.Pattern):
        return f"/{selector.pattern}/"
    return getattr(selector, "__name__", repr(selector))
