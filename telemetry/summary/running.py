"""Streaming statistics for anyone's data loop: the same summaries and histograms, fed one tensor at a time.

Both keep their state on the device of the tensors they are given and never read it back before ``result``, so that
``update`` does not make the host wait. Both pickle, merge with what another process has kept, and start over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from telemetry.errors import SketchDescriptorMismatchError
from telemetry.summary.aten import accumulate_row
from telemetry.summary.backend import reduce_into
from telemetry.summary.fields import MAX, MIN, NUM_INTS, ROW_WORDS
from telemetry.summary.histogram import DEFAULT_DESCRIPTOR, Histogram, HistogramDescriptor
from telemetry.summary.record import TensorSummary
from telemetry.summary.summarize import descriptor_of, fitting_weight, local_part, summary_of

__all__ = ["RunningHistogram", "RunningStats"]


def _empty_row(device: torch.device) -> Tensor:
    row = torch.zeros(ROW_WORDS, dtype=torch.int64, device=device)
    floats = row.view(torch.float64)[NUM_INTS:]
    floats[MIN], floats[MAX] = torch.inf, -torch.inf
    return row


class RunningStats:
    """The summary of all tensors seen so far.

    Args:
        histogram: a grid to count on, or True for the default one.

    Example:
        >>> import torch
        >>> from telemetry.summary import RunningStats
        >>> stats = RunningStats()
        >>> for batch in torch.arange(6.0).split(2):
        ...     _ = stats.update(batch)
        >>> stats.result().mean
        2.5
    """

    def __init__(self, histogram: HistogramDescriptor | bool | None = None) -> None:
        self._descriptor = descriptor_of(histogram)
        self._row: Tensor | None = None
        self._counts: Tensor | None = None

    def reset(self) -> RunningStats:
        """Forget everything seen."""
        self._row = self._counts = None
        return self

    def _place(self, device: torch.device) -> Tensor:
        if self._row is None:
            self._row = _empty_row(device)
            if self._descriptor is not None:
                self._counts = torch.zeros(self._descriptor.num_counts, dtype=torch.int64, device=device)
        return self._row

    def update(self, tensor: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None) -> RunningStats:
        """Take in a tensor; arguments and errors are those of :func:`telemetry.summary.summarize`.

        All tensors of one object lie on one device.
        """
        local = local_part(tensor)
        weight = fitting_weight(local, mask, weights)
        row = self._place(local.device)
        reduce_into(local, row, mask=weight, counts=self._counts, descriptor=self._descriptor, accumulate=True)
        return self

    def merge(self, other: RunningStats) -> RunningStats:
        """Take in what ``other`` has seen, as later than one's own; ``other`` is left alone.

        Raises:
            SketchDescriptorMismatchError: the grids differ, or only one has any.
        """
        if self._descriptor != other._descriptor:
            raise SketchDescriptorMismatchError(
                f"cannot merge statistics on {other._descriptor} into those on {self._descriptor}",
                remedy="make both with the same histogram argument",
            )
        if other._row is None:
            return self
        row = self._place(other._row.device)
        accumulate_row(row, other._row.to(row.device))
        if self._counts is not None and other._counts is not None:
            self._counts += other._counts.to(row.device)
        return self

    def result(self) -> TensorSummary:
        """Return the summary so far; the host waits for the device here."""
        if self._row is None:
            return RunningStats(self._descriptor)._placed_on_cpu().result()
        return summary_of(self._row, self._counts, self._descriptor, None, None)

    def _placed_on_cpu(self) -> RunningStats:
        self._place(torch.device("cpu"))
        return self


class RunningHistogram:
    """The histogram of all tensors seen so far.

    For whoever wants counts alone; :class:`RunningStats` with a histogram has the moments too and costs little more.

    Args:
        descriptor: the grid.
    """

    def __init__(self, descriptor: HistogramDescriptor = DEFAULT_DESCRIPTOR) -> None:
        self._stats = RunningStats(descriptor)

    def reset(self) -> RunningHistogram:
        """Forget everything seen."""
        self._stats.reset()
        return self

    def update(self, tensor: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None) -> RunningHistogram:
        """Count a tensor; see :meth:`RunningStats.update`."""
        self._stats.update(tensor, mask=mask, weights=weights)
        return self

    def merge(self, other: RunningHistogram) -> RunningHistogram:
        """Add what ``other`` has counted; see :meth:`RunningStats.merge`."""
        self._stats.merge(other._stats)
        return self

    def result(self) -> Histogram:
        """Return the histogram so far; the host waits for the device here."""
        histogram = self._stats.result().histogram
        assert histogram is not None
        return histogram
