"""The settings file: where it is looked for, and what stands in it.

``RANKFOLD_CONFIG`` names it; else it is ``rankfold.toml``, or ``pyproject.toml`` with a table ``tool.rankfold``, in the
working directory. Folders above are not searched: a job must not record something else because of where it was started.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from telemetry.errors import SettingMalformedError

__all__ = ["CONFIG_VARIABLE", "SettingsFile", "read_settings_file"]

CONFIG_VARIABLE: Final = "RANKFOLD_CONFIG"
_OURS: Final = "rankfold.toml"
_PROJECT: Final = "pyproject.toml"


@dataclass(frozen=True)
class SettingsFile:
    """The values of a file as TOML has them; no values and no path where there is no file."""

    path: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def read_settings_file(named: str, folder: Path) -> SettingsFile:
    """Read the settings file.

    Args:
        named: value of ``RANKFOLD_CONFIG``, "" where it is not set; relative to ``folder``.
        folder: the working directory.

    Raises:
        SettingMalformedError: the named file cannot be read, or a file is no TOML or holds no table of settings.
    """
    if named:
        return _read(folder / named, shown=f"{named} (named by {CONFIG_VARIABLE})")
    for name in (_OURS, _PROJECT):
        if (folder / name).is_file() and (found := _read(folder / name, shown=name)).values:
            return found
    return SettingsFile()


def _read(path: Path, shown: str) -> SettingsFile:
    try:
        document = _parse(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        raise SettingMalformedError(
            f"the settings file {shown} cannot be read: {error}",
            remedy=f"correct it, or name another one with {CONFIG_VARIABLE}",
        ) from error
    values = document
    if path.name == _PROJECT:
        tools = document.get("tool")
        values = tools.get("rankfold", {}) if isinstance(tools, Mapping) else {}
    if not isinstance(values, Mapping):
        raise SettingMalformedError(
            f"{shown}: tool.rankfold is no table", remedy="write [tool.rankfold] and keys below"
        )
    return SettingsFile(shown, values)


def _parse(text: str) -> Mapping[str, Any]:
    # Both raise a subclass of ValueError for what is no TOML.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    document: dict[str, Any] = tomllib.loads(text)
    return document
