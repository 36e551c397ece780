"""The observations of one step on one rank, from the first hook to the packet."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.collect.book import LocalSite, SiteBook
from telemetry.collect.budget import CostBudget
from telemetry.dtensor import is_partial, local_tensor, reduced
from telemetry.errors import RankfoldError
from telemetry.packet import NO_RANK, Packet, StepFacts
from telemetry.presence import Presence
from telemetry.replicas import DIGEST_FIELDS, ReplicaTable
from telemetry.sites import SiteSpec
from telemetry.staging import StagingBuffer
from telemetry.summary.fields import ABSMAX, FINITE, FLOAT_FIELDS, NUM_FLOATS, NUM_INTS, TOTAL
from telemetry.summary.histogram import HistogramDescriptor
from telemetry.summary.merge import identity
from telemetry.torch_internals import is_fake, reading

__all__ = ["DrainedStep", "Observations", "Origin", "unreadable"]


@dataclass(frozen=True)
class Origin:
    """What every packet of a session carries of where it comes from.

    Attributes:
        run_id, segment: of the record; resume_step: first step of a segment that the session has begun itself.
        rank, world_size: of this process.
    """

    run_id: str
    segment: int
    rank: int
    world_size: int
    resume_step: int | None = None

    def in_next_segment(self, resume_step: int) -> Origin:
        """Return the origin of packets after the loop has gone back to ``resume_step``."""
        return replace(self, segment=self.segment + 1, resume_step=resume_step)


@dataclass
class _State:
    presence: Presence
    reason: str


class Observations:
    """Collects a step: reduces tensors at once, keeps no reference to any, and never raises at whoever observes."""

    def __init__(self, book: SiteBook, descriptor: HistogramDescriptor, budget: CostBudget | None = None) -> None:
        self._book = book
        self._descriptor = descriptor
        self._budget = budget
        self._left_out: frozenset[LocalSite] = frozenset()
        self._buffers: dict[torch.device, StagingBuffer] = {}
        self._states: dict[LocalSite, _State] = {}
        self._histogram = False
        self._read_bytes = 0
        # Autograd runs hooks of different devices on threads of its own.
        self._lock = threading.Lock()

    def begin(self, *, histogram: bool, left_out: frozenset[LocalSite] = frozenset()) -> None:
        """Start a step.

        Args:
            histogram: whether observations also count bins.
            left_out: sites that are not observed, to keep the budget.
        """
        self._histogram = histogram
        self._left_out = left_out
        self.discard()

    def discard(self) -> None:
        """Forget the step."""
        self._read_bytes = 0
        self._states.clear()
        for buffer in self._buffers.values():
            buffer.discard()

    def is_observed(self, site: LocalSite) -> bool:
        """Tell whether the site has numbers in this step."""
        state = self._states.get(site)
        return state is not None and state.presence is Presence.OBSERVED

    def is_left_out(self, site: LocalSite) -> bool:
        """Tell whether the step leaves the site out to keep the budget."""
        return site in self._left_out

    def expect(self, site: LocalSite, reason: str) -> None:
        """Schedule a site: unless something comes for it, its row says ``site_absent`` for ``reason``."""
        if site in self._left_out:
            self._leave_out(site)
        else:
            self._states.setdefault(site, _State(Presence.SITE_ABSENT, reason))

    def charge(self, site: LocalSite, seconds: float) -> None:
        """Count time that a site has cost beside its reduction."""
        if self._budget is not None:
            self._budget.charge(site, seconds)

    def _leave_out(self, site: LocalSite) -> None:
        assert self._budget is not None, "only a budget leaves sites out"
        self._states.setdefault(site, _State(Presence.BUDGET_DROPPED, self._budget.reason))

    def mark(self, site: LocalSite, presence: Presence, reason: str) -> None:
        """Say why a scheduled site has no numbers; an observation of the same step outranks it."""
        if not self.is_observed(site):
            self._states[site] = _State(presence, reason)

    def note(self, site: LocalSite, reason: str) -> None:
        """Say something that a reader of the site's numbers has to know."""
        if self.is_observed(site):
            self._states[site].reason = reason

    def observe(self, site: LocalSite, tensor: Tensor) -> None:
        """Reduce a tensor into its site; a failure becomes the presence of the row."""
        if site in self._left_out:
            self._leave_out(site)
            return
        try:
            with reading(), self._lock:
                started = time.perf_counter()
                self._reduce(site, tensor)
                self.charge(site, time.perf_counter() - started)
        except RankfoldError as error:
            self.mark(site, Presence.UNSUPPORTED, f"{error.code}: {error.message}")
        except Exception as error:  # telemetry must not end a training step, whatever the tensor does
            self.mark(site, Presence.CAPTURE_FAILED, f"{type(error).__name__}: {error}"[:300])

    def _reduce(self, site: LocalSite, tensor: Tensor) -> None:
        if why := site.refusal or unreadable(tensor):
            self.mark(site, Presence.UNSUPPORTED, why)
            return
        if tensor.is_sparse:
            buffer, slot = self._slot(site, tensor.device)
            values = tensor.coalesce().values()
            self._read_bytes += values.nbytes
            buffer.observe_sparse(slot, values, tensor.numel(), histogram=self._histogram)
            self._states[site] = _State(Presence.OBSERVED, "")
            return
        tensor = local_tensor(reduced(tensor) if is_partial(tensor) else tensor)
        self._read_bytes += tensor.nbytes
        buffer, slot = self._slot(site, tensor.device)
        check = site.replica_slot is not None
        buffer.observe(slot, tensor, histogram=self._histogram, take_fingerprint=check)
        self._states[site] = _State(Presence.OBSERVED, "")

    def _slot(self, site: LocalSite, device: torch.device) -> tuple[StagingBuffer, int]:
        buffer = self._buffers.get(device)
        if buffer is None:
            buffer = self._buffers[device] = StagingBuffer(device, self._descriptor)
        slot = site.slots.get(device)
        if slot is None:
            slot = site.slots[device] = buffer.new_slot()
        return buffer, slot

    def tally(self) -> dict[tuple[str, Presence], int]:
        """Count this step's rows by kind and presence."""
        counts: dict[tuple[str, Presence], int] = {}
        for site, state in self._states.items():
            key = (site.spec.kind, state.presence)
            counts[key] = counts.get(key, 0) + 1
        return counts

    def drain(self) -> DrainedStep:
        """End the step: bring its rows to the host, one transfer a device and one more with histograms."""
        rows = _Rows(sorted(self._states, key=lambda site: site.site_id), self._descriptor)
        started = time.perf_counter()
        transfer_bytes = sum(rows.take(device, buffer) for device, buffer in self._buffers.items())
        drained = DrainedStep(
            rows=rows,
            states=dict(self._states),
            read_bytes=self._read_bytes,
            transfer_s=time.perf_counter() - started,
            transfer_bytes=transfer_bytes,
            definitions=self._book.take_unsent(),
        )
        self._states.clear()
        self._read_bytes = 0
        return drained


def unreadable(tensor: Tensor) -> str:
    """Return why the elements of a tensor cannot be read as they lie, or ""."""
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"the tensor's layout is {tensor.layout}"
    if is_fake(tensor):
        return "the tensor has no data: the model is being traced"
    if tensor.is_meta:
        return "the tensor is on the meta device and has no data"
    if tensor.is_quantized:
        return "the tensor is quantized"
    return ""


@dataclass(frozen=True)
class DrainedStep:
    """A step's observations in host memory.

    Attributes:
        rows, states: of the scheduled sites; definitions: of those that no packet has defined.
        read_bytes: bytes of the tensors that were reduced.
        transfer_s, transfer_bytes: what bringing the rows to the host took, in seconds, and how much that was.
    """

    rows: _Rows
    states: Mapping[LocalSite, _State]
    read_bytes: int
    transfer_s: float
    transfer_bytes: int
    definitions: tuple[SiteSpec, ...]

    @property
    def num_budget_dropped(self) -> int:
        """Observations that were left out to keep the budget."""
        return sum(state.presence is Presence.BUDGET_DROPPED for state in self.states.values())

    def to_packet(self, step: int, origin: Origin, facts: StepFacts) -> Packet:
        """Pack the step with what happened around it."""
        return self.rows.pack(self.states, step, origin, facts, self.definitions)


class _Rows:
    """Packet columns in the making, one row a site, ascending by site id."""

    def __init__(self, sites: list[LocalSite], descriptor: HistogramDescriptor) -> None:
        self._sites = sites
        self._descriptor = descriptor
        self._ints = np.zeros((len(sites), NUM_INTS), dtype=np.int64)
        self._floats = np.zeros((len(sites), NUM_FLOATS), dtype=np.float64)
        self._fingerprints = np.zeros(len(sites), dtype=np.int64)
        self._counts: dict[int, NDArray[np.int64]] = {}

    def take(self, device: torch.device, buffer: StagingBuffer) -> int:
        """Drain one device; returns how many bytes came."""
        staged = buffer.drain()
        row_of = {int(slot): row for row, slot in enumerate(staged.slots)}
        hist_of = {int(slot): row for row, slot in enumerate(staged.hist_slots)}
        for index, site in enumerate(self._sites):
            slot = site.slots.get(device)
            if slot in row_of:
                self._ints[index] = staged.ints[row_of[slot]]
                self._floats[index] = staged.floats[row_of[slot]]
                self._fingerprints[index] = staged.fingerprints[row_of[slot]]
            if slot in hist_of:
                self._counts[index] = staged.hist_counts[hist_of[slot]]
        return staged.ints.nbytes + staged.floats.nbytes + staged.fingerprints.nbytes + staged.hist_counts.nbytes

    def pack(
        self,
        states: Mapping[LocalSite, _State],
        step: int,
        origin: Origin,
        facts: StepFacts,
        definitions: tuple[SiteSpec, ...],
    ) -> Packet:
        observed = np.array([states[site].presence is Presence.OBSERVED for site in self._sites], dtype=bool)
        counts_here = observed & np.array([site.contributes for site in self._sites], dtype=bool)
        # A rank that holds a replica says that it observed, and whether it saw non-finite values, but adds nothing.
        nonfinite = observed & (self._ints[:, TOTAL] > self._ints[:, FINITE])
        has_absmax = counts_here & (self._ints[:, FINITE] > 0)
        ints, floats = identity(len(self._sites))
        ints[counts_here], floats[counts_here] = self._ints[counts_here], self._floats[counts_here]
        assert np.all(floats[has_absmax, ABSMAX] >= 0)
        reasons = tuple(dict.fromkeys(state.reason for state in states.values() if state.reason))
        hist_rows = sorted(row for row in self._counts if counts_here[row])
        site_ids = np.array([site.site_id for site in self._sites], dtype=np.uint64)
        return Packet(
            run_id=origin.run_id,
            segment=origin.segment,
            step=step,
            world_size=origin.world_size,
            ranks=(origin.rank,),
            descriptor=self._descriptor,
            sites=site_ids,
            ints=ints,
            floats=floats,
            presence=np.array([states[site].presence for site in self._sites], dtype=np.uint8),
            reason=np.array([_index(reasons, states[site].reason) for site in self._sites], dtype=np.int32),
            num_scheduled=np.ones(len(self._sites), dtype=np.int32),
            num_observed=observed.astype(np.int32),
            num_contributing=counts_here.astype(np.int32),
            absmax_rank=np.where(has_absmax, origin.rank, NO_RANK).astype(np.int32),
            num_nonfinite_ranks=nonfinite.astype(np.int32),
            first_nonfinite_rank=np.where(nonfinite, origin.rank, NO_RANK).astype(np.int32),
            hist_sites=site_ids[hist_rows],
            hist_counts=np.array([self._counts[row] for row in hist_rows], dtype=np.int64).reshape(
                len(hist_rows), self._descriptor.num_counts
            ),
            facts=facts,
            definitions=definitions,
            reasons=reasons,
            replicas=self._replicas(origin.rank, site_ids, observed),
            resume_step=origin.resume_step,
        )

    def _replicas(self, rank: int, site_ids: NDArray[np.uint64], observed: NDArray[np.bool_]) -> ReplicaTable:
        rows = [i for i, site in enumerate(self._sites) if observed[i] and site.replica_slot is not None]
        slots = np.array([self._sites[i].replica_slot for i in rows], dtype=np.int64)
        digests = self._floats[rows][:, [FLOAT_FIELDS.index(name) for name in DIGEST_FIELDS]]
        return ReplicaTable.of_rank(rank, site_ids[rows], slots, self._fingerprints[rows], digests)


def _index(reasons: tuple[str, ...], reason: str) -> int:
    return reasons.index(reason) if reason else -1
