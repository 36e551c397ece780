"""How a refusal is printed: what a ``RankfoldError`` says of itself, without a traceback."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

__all__ = ["print_refusal"]


def print_refusal(text: str) -> None:
    """Print ``[code] message``, ranks, remedy, one a line, on standard error."""
    code, _, rest = text.partition("] ")
    Console(stderr=True, soft_wrap=True).print(Text.assemble((code + "]", "bold red"), " ", rest))
