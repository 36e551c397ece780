"""What a cast to a narrower format would lose: the counts and the squared error that decide whether it may be made.

The cast rounds to nearest, ties to even, once, from the value itself, and saturates. Over the finite elements:

- ``underflow``: not zero, but zero after the cast.
- ``overflow``: beyond the largest finite value even after rounding; the cast clamps it.
- ``saturated``: lands on the largest finite value; overflow is part of it.
- ``sum_sq_error``: Σ (x - cast(x))².

A packed record is int64 ``[4]``: the three counts, then the error as the bits of a float64. Counts merge exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from telemetry.errors import ConfigurationError, DtypeUnsupportedError

__all__ = ["QUANTIZATION_WORDS", "TARGETS", "QuantizationLoss", "TargetFormat", "target_format"]

QUANTIZATION_WORDS: Final = 4
UNDERFLOW, OVERFLOW, SATURATED, SUM_SQ_ERROR = range(QUANTIZATION_WORDS)


@dataclass(frozen=True)
class TargetFormat:
    """A floating-point format that a tensor may be cast to.

    Attributes:
        name: of the torch dtype.
        mantissa_bits: stored ones, without the implicit leading bit.
        min_exponent: of the smallest normal value; subnormals share its spacing.
        max_finite: largest finite value.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    max_finite: float


TARGETS: Final = MappingProxyType(
    {
        target.name: target
        for target in (
            TargetFormat("float8_e4m3fn", 3, -6, 448.0),
            TargetFormat("float8_e5m2", 2, -14, 57344.0),
            TargetFormat("bfloat16", 7, -126, float.fromhex("0x1.fep127")),
            TargetFormat("float16", 10, -14, 65504.0),
        )
    }
)


def target_format(target: str | torch.dtype) -> TargetFormat:
    """Return the format called ``target``.

    Raises:
        DtypeUnsupportedError: there is no such target.
    """
    name = str(target).removeprefix("torch.")
    if name not in TARGETS:
        raise DtypeUnsupportedError(
            f"{target} is not a target format; accepted are {', '.join(TARGETS)}",
            remedy="name the format that the tensor would be stored in",
        )
    return TARGETS[name]


@dataclass(frozen=True)
class QuantizationLoss:
    """What casting one population to ``target`` would lose.

    Attributes:
        target: name of the format.
        finite: elements that the counts are out of.
        underflow, overflow, saturated: see the module.
        sum_sq_error: Σ (x - cast(x))² in float64.
    """

    target: str
    finite: int
    underflow: int
    overflow: int
    saturated: int
    sum_sq_error: float

    @staticmethod
    def from_packed(target: TargetFormat, finite: int, words: NDArray[np.int64]) -> QuantizationLoss:
        """Wrap a packed record, int64 ``[4]``."""
        counts = (int(words[UNDERFLOW]), int(words[OVERFLOW]), int(words[SATURATED]))
        return QuantizationLoss(target.name, finite, *counts, float(words.view(np.float64)[SUM_SQ_ERROR]))

    @property
    def mean_sq_error(self) -> float:
        """Mean squared error of the cast, NaN where there is no finite element."""
        return self.sum_sq_error / self.finite if self.finite else float("nan")

    def merge(self, other: QuantizationLoss) -> QuantizationLoss:
        """Return the loss of both populations.

        Raises:
            ConfigurationError: the targets differ.
        """
        if self.target != other.target:
            raise ConfigurationError(
                f"cannot merge the losses of casts to {self.target} and to {other.target}",
                remedy="summarize both with the same target",
            )
        return QuantizationLoss(
            self.target,
            self.finite + other.finite,
            self.underflow + other.underflow,
            self.overflow + other.overflow,
            self.saturated + other.saturated,
            self.sum_sq_error + other.sum_sq_error,
        )
