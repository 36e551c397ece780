"""Where the settings of a session come from: argument, environment, file, what a framework suggests, default.

Read by ``watch`` and at no other time. What is malformed is refused even where an argument overrides it, because the
next run would stumble over it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from telemetry.collect.setting_values import SETTING_SPECS, SettingSpec
from telemetry.collect.settings_file import CONFIG_VARIABLE, SettingsFile, read_settings_file
from telemetry.errors import ConfigurationError, RankfoldError, SettingMalformedError

__all__ = ["DISABLE_VARIABLE", "UNSET", "Setting", "Settings", "Suggested", "Unset", "resolve_settings"]

DISABLE_VARIABLE: Final = "RANKFOLD_DISABLE"

_ARGUMENT: Final = "argument"
_DEFAULT: Final = "default"


class Unset(Enum):
    """Type of ``UNSET``, the default of arguments that can also be set outside of the code."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return self.value


UNSET: Final = Unset.UNSET


@dataclass(frozen=True)
class Suggested:
    """In the place of an argument: what an integration takes from its framework, unless anybody says otherwise.

    Attributes:
        value: of the argument.
        origin: where the framework has it from, such as ``TrainingArguments.logging_steps``.
    """

    value: Any
    origin: str


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: of the argument of ``watch``.
        value: what the session uses.
        origin: ``argument``, the name of a variable, of a file, what suggested it, or ``default``.
    """

    name: str
    value: Any
    origin: str

    @property
    def is_default(self) -> bool:
        """Whether nobody set it."""
        return self.origin == _DEFAULT

    @property
    def is_outside(self) -> bool:
        """Whether it was set outside of the code."""
        return self.origin not in (_ARGUMENT, _DEFAULT)

    @property
    def words(self) -> str:
        """The value as a reader of the plan or the run record sees it."""
        return _in_words(self.value)

    def __str__(self) -> str:
        return f"{self.name} = {self.words} ({self.origin})"


@dataclass(frozen=True)
class Settings:
    """All settings of a session.

    Attributes:
        by_name: each one; a malformed one has the value of the next origin.
        is_disabled: whether the kill switch is set in this process.
        failure: the first thing that was malformed, or None.
    """

    by_name: Mapping[str, Setting]
    is_disabled: bool
    failure: RankfoldError | None

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name].value

    @property
    def changed(self) -> tuple[Setting, ...]:
        """Those that are no defaults."""
        return tuple(setting for setting in self.by_name.values() if not setting.is_default)

    def explain(self, error: RankfoldError) -> None:
        """Add to the remedy which settings came from outside, for whoever looks for the cause in the code."""
        outside = [f"{setting.name} from {setting.origin}" for setting in self.changed if setting.is_outside]
        if outside and not isinstance(error, SettingMalformedError):
            error.remedy = f"{error.remedy}; set outside of the code: {', '.join(outside)}".removeprefix("; ")


def resolve_settings(given: Mapping[str, Any], environ: Mapping[str, str], folder: Path) -> Settings:
    """Find the value and the origin of every setting; never raises.

    Args:
        given: arguments by name, ``UNSET`` where the caller left one out, :class:`Suggested` for a weaker one.
        environ: the environment.
        folder: the working directory.
    """
    problems: list[RankfoldError] = []
    try:
        file = read_settings_file(environ.get(CONFIG_VARIABLE, "").strip(), folder)
    except SettingMalformedError as error:
        file = SettingsFile()
        problems.append(error)
    problems += _unknown_keys(file)
    settings = {spec.name: _resolve(spec, given[spec.name], environ, file, problems) for spec in SETTING_SPECS}
    if settings["to"].is_default:
        problems.append(
            ConfigurationError("no destination was given", remedy="give to=..., or set RANKFOLD_TO to a directory")
        )
    return Settings(settings, _is_disabled(environ), problems[0] if problems else None)


def _resolve(
    spec: SettingSpec,
    argument: Any,
    environ: Mapping[str, str],
    file: SettingsFile,
    problems: list[RankfoldError],
) -> Setting:
    is_given = argument is not UNSET and not isinstance(argument, Suggested)
    found = [Setting(spec.name, argument, _ARGUMENT)] if is_given else []
    outside: list[tuple[str, object, str]] = []
    # An empty variable is one that somebody took back.
    if text := environ.get(spec.variable, "").strip():
        outside.append((spec.variable, text, spec.variable))
    if spec.name in file.values:
        outside.append((f"{spec.name} in {file.path}", file.values[spec.name], file.path))
    for where, raw, origin in outside:
        try:
            found.append(Setting(spec.name, spec.parse(raw), origin))
        except ValueError:
            problems.append(SettingMalformedError(f"{where} is {raw!r}", remedy=f"it has to be {spec.wanted}"))
    if isinstance(argument, Suggested):
        found.append(Setting(spec.name, argument.value, argument.origin))
    return (*found, Setting(spec.name, spec.default, _DEFAULT))[0]


def _unknown_keys(file: SettingsFile) -> list[RankfoldError]:
    names = [spec.name for spec in SETTING_SPECS]
    return [
        SettingMalformedError(f"there is no setting {key!r}, as in {file.path}", remedy=f"use {', '.join(names)}")
        for key in file.values
        if key not in names
    ]


def _is_disabled(environ: Mapping[str, str]) -> bool:
    # Whoever reaches for the switch means it: all that is no clear "off" turns telemetry off.
    return environ.get(DISABLE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no", "off")


def _in_words(value: Any) -> str:
    if value is None or value == () or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={steps}" for name, steps in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(_in_words, value))
    if isinstance(value, re.Pattern):
        return f"/{value.pattern}/"
    if isinstance(value, str | int | float | Path) or (is_dataclass(value) and not isinstance(value, type)):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)
