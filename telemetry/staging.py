"""Packed rows wait on their device until the step ends, then leave in one transfer.

A site has one slot. The first observation of a step overwrites the slot, later ones (micro-batches, a module called
twice) fold into it, so memory does not grow with the number of calls. Draining copies all rows of a device at once, and
all histograms of a device at once: the number of transfers depends on neither the sites nor the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.fingerprint import combine_, fingerprint
from telemetry.summary.aten import accumulate_row
from telemetry.summary.backend import reduce_into
from telemetry.summary.fields import FINITE, NUM_INTS, ROW_WORDS, TOTAL, ZERO
from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["StagedRows", "StagingBuffer"]

_INITIAL_SLOTS: Final = 64


@dataclass(frozen=True, eq=False)
class StagedRows:
    """What one device had staged, now in host memory.

    Attributes:
        slots: int64 ``[n]``, ascending slots that were observed in the step.
        ints, floats: ``[n, 8]`` int64 and ``[n, 10]`` float64, row-aligned with ``slots``.
        hist_slots: int64 ``[h]``, ascending slots with a histogram.
        hist_counts: int64 ``[h, num_counts]``.
        fingerprints: int64 ``[n]``, row-aligned with ``slots``; 0 where none was taken.
    """

    slots: NDArray[np.int64]
    ints: NDArray[np.int64]
    floats: NDArray[np.float64]
    hist_slots: NDArray[np.int64]
    hist_counts: NDArray[np.int64]
    fingerprints: NDArray[np.int64]


class StagingBuffer:
    """The preallocated rows and histograms of one device; filled by hooks, drained once a logged step."""

    def __init__(self, device: torch.device, descriptor: HistogramDescriptor) -> None:
        self._descriptor = descriptor
        # A row and, in the word after it, the fingerprint of the same elements.
        self._rows = torch.zeros(_INITIAL_SLOTS, ROW_WORDS + 1, dtype=torch.int64, device=device)
        # Histograms take their own, lazily filled slots: most steps have none.
        self._counts = torch.zeros(0, descriptor.num_counts, dtype=torch.int64, device=device)
        self._num_slots = 0
        self._filled: set[int] = set()
        self._hist_filled: set[int] = set()

    def new_slot(self) -> int:
        """Reserve a slot for one more site."""
        slot = self._num_slots
        self._num_slots += 1
        if self._num_slots > len(self._rows):
            self._rows = torch.cat((self._rows, torch.zeros_like(self._rows)))
        return slot

    def observe(self, slot: int, tensor: Tensor, *, histogram: bool, take_fingerprint: bool = False) -> None:
        """Reduce ``tensor`` (on this device) into ``slot``, folding with earlier observations of the step."""
        is_first = slot not in self._filled
        self._filled.add(slot)
        reduce_into(
            tensor,
            self._rows[slot, :ROW_WORDS],
            counts=self._counts_of(slot) if histogram else None,
            descriptor=self._descriptor if histogram else None,
            accumulate=not is_first,
        )
        if take_fingerprint:
            kept = self._rows[slot, ROW_WORDS]
            if is_first:
                kept.zero_()
            combine_(kept, fingerprint(tensor))

    def observe_sparse(self, slot: int, values: Tensor, num_elements: int, *, histogram: bool) -> None:
        """Reduce a sparse tensor by its stored ``values``; the other of its ``num_elements`` elements are zero."""
        self.observe(slot, values, histogram=histogram)
        num_zeros = num_elements - values.numel()
        row = self._rows[slot, :ROW_WORDS]
        zeros = torch.zeros_like(row)
        # Of zeros every float of a row is 0.0, whose bits are 0 as well.
        zeros[[TOTAL, FINITE, ZERO]] = num_zeros
        if num_zeros > 0:
            accumulate_row(row, zeros)
        if histogram:
            self._counts_of(slot)[self._descriptor.zero_index] += num_zeros

    def _counts_of(self, slot: int) -> Tensor:
        if slot >= len(self._counts):
            more = self._counts.new_zeros(len(self._rows) - len(self._counts), self._descriptor.num_counts)
            self._counts = torch.cat((self._counts, more))
        counts = self._counts[slot]
        if slot not in self._hist_filled:
            counts.zero_()
            self._hist_filled.add(slot)
        return counts

    def drain(self) -> StagedRows:
        """Bring the step's rows to the host and empty the buffer; on an accelerator this waits for the device."""
        slots = np.array(sorted(self._filled), dtype=np.int64)
        hist_slots = np.array(sorted(self._hist_filled), dtype=np.int64)
        words = _to_host(self._rows, slots)
        counts = _to_host(self._counts, hist_slots)
        self.discard()
        floats = np.ascontiguousarray(words[:, NUM_INTS:ROW_WORDS]).view(np.float64)
        return StagedRows(slots, words[:, :NUM_INTS].copy(), floats, hist_slots, counts, words[:, ROW_WORDS].copy())

    def discard(self) -> None:
        """Forget the step's observations, as after a step that raised."""
        self._filled.clear()
        self._hist_filled.clear()


def _to_host(buffer: Tensor, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(slots) == 0:
        return np.empty((0, buffer.shape[1]), dtype=np.int64)
    # The slots in use are copied as one block and picked apart here, so no index has to travel to the device.
    host: NDArray[np.int64] = buffer[: int(slots[-1]) + 1].cpu().numpy()
    return host[slots]
