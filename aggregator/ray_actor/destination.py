"""Where a run goes: ``ray://NAME`` names the actor, ``?dir=PATH`` the run directory that it writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from telemetry.errors import ConfigurationError

__all__ = ["SCHEME", "RayDestination"]

SCHEME: Final = "ray"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_GRAMMAR: Final = "write ray://NAME or ray://NAME?dir=PATH; NAME has letters, digits and . _ -, such as ray://exp1"


@dataclass(frozen=True)
class RayDestination:
    """A destination, checked.

    Attributes:
        name: what the actor of every attempt of this run is found by.
        directory: the run directory as it was given; ``runs/NAME`` if it was not.

    Example:
        >>> RayDestination.parse("ray://exp1?dir=/shared/runs/exp1").directory
        '/shared/runs/exp1'
        >>> RayDestination.parse("ray://exp1").directory
        'runs/exp1'
    """

    name: str
    directory: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(f"{self.name!r} is no name for a run under Ray", remedy=_GRAMMAR)
        if not self.directory:
            raise ConfigurationError(f"ray://{self.name} has an empty directory", remedy=_GRAMMAR)

    @staticmethod
    def of(name: str, directory: str | None = None) -> RayDestination:
        """Return the destination of a name, with the directory that it has by default.

        Raises:
            ConfigurationError: a name or directory that cannot be.
        """
        return RayDestination(name, f"runs/{name}" if directory is None else directory)

    @staticmethod
    def parse(text: str) -> RayDestination:
        """Read ``ray://NAME[?dir=PATH]``; PATH may be percent-encoded.

        Raises:
            ConfigurationError: it is something else.
        """
        parts = urlsplit(text)
        options = parse_qsl(parts.query, keep_blank_values=True)
        if parts.scheme != SCHEME or parts.path or parts.fragment or len(options) > 1:
            raise ConfigurationError(f"{text!r} is no destination under Ray", remedy=_GRAMMAR)
        if options and options[0][0] != "dir":
            raise ConfigurationError(f"{text!r} has an unknown option {options[0][0]!r}", remedy=_GRAMMAR)
        return RayDestination.of(unquote(parts.netloc), options[0][1] if options else None)

    def resolved(self) -> RayDestination:
        """Return it with an absolute directory, as seen from the working directory of this process."""
        return RayDestination(self.name, str(Path(self.directory).expanduser().absolute()))

    def __str__(self) -> str:
        return f"{SCHEME}://{self.name}?dir={quote(self.directory)}"
