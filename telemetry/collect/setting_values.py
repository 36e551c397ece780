"""Which settings can be made outside of the code, and how each one is written in a variable or a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from telemetry.collect.schedule import DEFAULT_EVERY, DEFAULT_HIST_EVERY
from telemetry.sites import SIGNALS

__all__ = ["SETTING_SPECS", "SettingSpec"]

_ON: Final = frozenset({"1", "true", "yes", "on"})
_OFF: Final = frozenset({"0", "false", "no", "off"})
_NONE: Final = "none"


@dataclass(frozen=True)
class SettingSpec:
    """One setting.

    Attributes:
        name: of the argument of ``watch``, and of the key in a file.
        default: its value where nobody sets it.
        parse: text of a variable, or value of a file → value of the argument; raises ``ValueError``.
        wanted: what ``parse`` takes, for the one who wrote something else.
    """

    name: str
    default: Any
    parse: Callable[[object], Any]
    wanted: str

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return f"RANKFOLD_{self.name.upper()}"


def _text(given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise ValueError
    return given.strip()


def _names(given: object) -> tuple[str, ...]:
    if isinstance(given, list):
        return tuple(_text(name) for name in given)
    text = _text(given)
    return () if text == _NONE else tuple(_text(name) for name in text.split(","))


def _signals(given: object) -> tuple[str, ...]:
    return tuple(_signal(name) for name in _names(given))


def _signal(name: str) -> str:
    if name not in SIGNALS:
        raise ValueError
    return name


def _interval(given: object) -> int:
    steps = _whole(given)
    if steps < 1:
        raise ValueError
    return steps


def _whole(given: object) -> int:
    if isinstance(given, str):
        return int(given)
    if isinstance(given, bool) or not isinstance(given, int):
        raise ValueError
    return given


def _interval_or_none(given: object) -> int | None:
    return None if isinstance(given, str) and given.strip() == _NONE else _interval(given)


def _step_or_none(given: object) -> int | None:
    return None if isinstance(given, str) and given.strip() == _NONE else _whole(given)


def _number_or_none(given: object) -> float | None:
    if isinstance(given, str):
        return None if given.strip() == _NONE else float(given)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ValueError
    return float(given)


def _intervals(given: object) -> int | dict[str, int]:
    if isinstance(given, str) and "=" in given:
        given = dict(_pair(part) for part in given.split(","))
    if isinstance(given, Mapping):
        return {_signal(name): _interval(steps) for name, steps in given.items()}
    return _interval(given)


def _pair(text: str) -> tuple[str, str]:
    name, equals, steps = text.partition("=")
    if not equals:
        raise ValueError
    return name.strip(), steps


def _switch(given: object) -> bool:
    if isinstance(given, bool):
        return given
    word = _text(given).lower()
    if word not in _ON | _OFF:
        raise ValueError
    return word in _ON


_SWITCH: Final = "1, true, yes, on, or 0, false, no, off"

SETTING_SPECS: Final = (
    SettingSpec("to", None, _text, "a directory, memory://NAME, or ray://NAME"),
    SettingSpec("signals", SIGNALS, _signals, f"names with commas between, of {', '.join(SIGNALS)}; or none"),
    SettingSpec("select", "*", _names, "globs of names with commas between"),
    SettingSpec("exclude", (), _names, "globs of names with commas between, or none"),
    SettingSpec("every", DEFAULT_EVERY, _intervals, "a whole number of steps, 1 or more, or SIGNAL=STEPS,SIGNAL=STEPS"),
    SettingSpec("hist_every", DEFAULT_HIST_EVERY, _interval_or_none, "a whole number of steps, 1 or more, or none"),
    SettingSpec("last_step", None, _step_or_none, "a whole number, or none"),
    SettingSpec("full_updates", False, _switch, _SWITCH),
    SettingSpec("budget_ms", None, _number_or_none, "milliseconds, or none"),
    SettingSpec("health", True, _switch, _SWITCH),
)
