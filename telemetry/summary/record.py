"""What a tensor becomes: one immutable, mergeable summary with its fields as attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.errors import ConfigurationError, SketchDescriptorMismatchError
from telemetry.summary.derive import SUMMARY_FIELDS, derive
from telemetry.summary.fields import INT_FIELDS
from telemetry.summary.histogram import Histogram
from telemetry.summary.merge import identity, merge_packed
from telemetry.summary.quantization import QuantizationLoss

__all__ = ["TensorSummary"]


class TensorSummary:
    """Exact counts and float64 moments of a population of tensor elements.

    Every name of ``SUMMARY_FIELDS`` is an attribute: the counts ``total finite zero negative nan pos_inf neg_inf
    calls`` are ``int``; ``min max absmax sum sum_sq sum_abs mean m2 m3 m4`` and the derived ``std var rms l2 mean_abs
    skewness kurtosis zero_fraction finite_fraction`` are ``float`` and NaN where there is no value. Floats are over the
    finite elements only.

    Attributes:
        histogram: the log2 histogram of the same elements, or None if none was asked for.
        reduction_dtype: the dtype that the floats were accumulated in.
        quantization: what a cast of the same elements to a target format would lose, or None if none was named.

    Example:
        >>> import torch
        >>> from telemetry.summary import summarize
        >>> whole = summarize(torch.tensor([1.0, 2.0])).merge(summarize(torch.tensor([3.0, float("nan")])))
        >>> whole.total, whole.finite, whole.mean
        (4, 3, 2.0)
    """

    __slots__ = ("_floats", "_ints", "histogram", "quantization", "reduction_dtype")

    total: int
    finite: int
    zero: int
    negative: int
    nan: int
    pos_inf: int
    neg_inf: int
    calls: int
    min: float
    max: float
    absmax: float
    sum: float
    sum_sq: float
    sum_abs: float
    mean: float
    m2: float
    m3: float
    m4: float
    std: float
    var: float
    rms: float
    l2: float
    mean_abs: float
    skewness: float
    kurtosis: float
    zero_fraction: float
    finite_fraction: float

    def __init__(
        self,
        ints: NDArray[np.int64],
        floats: NDArray[np.float64],
        histogram: Histogram | None = None,
        reduction_dtype: str = "float64",
        quantization: QuantizationLoss | None = None,
    ) -> None:
        """Wrap one packed row: ints int64 ``[8]``, floats float64 ``[10]`` (see ``telemetry.summary.fields``)."""
        self._ints = ints
        self._floats = floats
        self.histogram = histogram
        self.reduction_dtype = reduction_dtype
        self.quantization = quantization

    @staticmethod
    def empty() -> TensorSummary:
        """Return the identity of merge: no element, no call."""
        ints, floats = identity(1)
        return TensorSummary(ints[0], floats[0])

    def __getattr__(self, name: str) -> Any:
        if name not in SUMMARY_FIELDS:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; there are {SUMMARY_FIELDS}")
        value = derive(name, self._ints, self._floats)
        return int(value) if name in INT_FIELDS else float(value)

    def merge(self, other: TensorSummary) -> TensorSummary:
        """Return the summary of both populations; ``self`` is the earlier one in the order of float additions.

        Raises:
            SketchDescriptorMismatchError: only one has a histogram, or the grids differ.
            ConfigurationError: only one has a quantization loss, or the target formats differ.
        """
        ints, floats = merge_packed((self._ints, self._floats), (other._ints, other._floats))
        histogram, quantization = self._merged_histogram(other), self._merged_quantization(other)
        return TensorSummary(ints, floats, histogram, self.reduction_dtype, quantization)

    def _merged_histogram(self, other: TensorSummary) -> Histogram | None:
        if self.histogram is not None and other.histogram is not None:
            return self.histogram.merge(other.histogram)
        present, absent = (self, other) if self.histogram is not None else (other, self)
        if present.histogram is None or absent.calls == 0:
            return present.histogram
        raise SketchDescriptorMismatchError(
            "one summary has a histogram and the other has none",
            remedy="summarize both with the same histogram argument",
        )

    def _merged_quantization(self, other: TensorSummary) -> QuantizationLoss | None:
        if self.quantization is not None and other.quantization is not None:
            return self.quantization.merge(other.quantization)
        present, absent = (self, other) if self.quantization is not None else (other, self)
        if present.quantization is None or absent.calls == 0:
            return present.quantization
        raise ConfigurationError(
            "one summary has a quantization loss and the other has none",
            remedy="summarize both with the same target argument",
        )

    def to_dict(self) -> dict[str, int | float]:
        """Return every field by name, the derived ones included."""
        return {name: getattr(self, name) for name in SUMMARY_FIELDS}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSummary):
            return NotImplemented
        return (
            bool(np.array_equal(self._ints, other._ints))
            and bool(np.array_equal(self._floats, other._floats, equal_nan=True))
            and self.histogram == other.histogram
            and self.quantization == other.quantization
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ("total", "finite", "mean", "std", "min", "max")
        return f"TensorSummary({', '.join(f'{name}={getattr(self, name):.6g}' for name in shown)})"
