"""The version of this package, as installed."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

__all__ = ["VERSION"]


def _installed_version() -> str:
    try:
        return version("rankfold")
    except PackageNotFoundError:
        return "0+not-installed"


VERSION: Final = _installed_version()
