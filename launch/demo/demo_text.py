"""Real text that every machine has: the sources of the running Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library_text() -> Tensor:
    """Return the top-level modules of the standard library, in order of name, as uint8 ``[bytes]``.

    Raises:
        FileNotFoundError: this Python ships its library without sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise FileNotFoundError(f"{folder} holds no Python sources to train on")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class ByteBatches:
    """Random windows of a text; every rank draws its own, the same ones for the same seed."""

    def __init__(self, text: Tensor, *, batch_size: int, context: int, seed: int, rank: int) -> None:
        self._text = text
        self._offsets = torch.arange(context + 1)
        self._batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed + 1000 * rank)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 ``[batch, context]`` each, the targets one byte ahead."""
        last = len(self._text) - len(self._offsets)
        starts = torch.randint(last + 1, (self._batch_size, 1), generator=self._generator)
        windows = self._text[starts + self._offsets].long()
        return windows[:, :-1], windows[:, 1:]
