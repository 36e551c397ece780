"""One step of one rank, or of several merged ones, as columns and as versioned bytes.

A packet is what leaves a training process. Rows are ordered by the 64-bit site id, so that two packets pair by
identity whatever order their ranks met the sites in. The bytes are a magic word, a version, a JSON header and the raw
little-endian columns; nothing is pickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from telemetry.errors import PacketMalformedError, PacketVersionError
from telemetry.replicas import REPLICA_COLUMNS, ReplicaTable
from telemetry.sites import SiteSpec
from telemetry.summary.fields import NUM_FLOATS, NUM_INTS
from telemetry.summary.histogram import HistogramDescriptor

__all__ = ["NO_RANK", "PACKET_VERSION", "Packet", "StepFacts", "from_ranges", "to_ranges"]

PACKET_VERSION: Final = 1
NO_RANK: Final = -1

_MAGIC: Final = b"RFPK"
_PREFIX: Final = struct.Struct("<4sHI")

# name → (dtype on the wire, trailing shape; None stands for the number of counts of the descriptor)
_ROW_COLUMNS: Final[Mapping[str, tuple[str, tuple[int, ...]]]] = {
    "sites": ("<u8", ()),
    "ints": ("<i8", (NUM_INTS,)),
    "floats": ("<f8", (NUM_FLOATS,)),
    "presence": ("|u1", ()),
    "reason": ("<i4", ()),
    "num_scheduled": ("<i4", ()),
    "num_observed": ("<i4", ()),
    "num_contributing": ("<i4", ()),
    "absmax_rank": ("<i4", ()),
    "num_nonfinite_ranks": ("<i4", ()),
    "first_nonfinite_rank": ("<i4", ()),
}


@dataclass(frozen=True)
class StepFacts:
    """What happened around the observations of a step, merged over ranks.

    Attributes:
        num_applied, num_skipped, num_unknown: ranks on which the optimizer stepped, skipped, or could not be seen.
        skipped_ranks: the lowest ranks on which it was skipped, at most 8.
        num_micro_batches: forward passes of the model in the step, the most of any rank.
        num_optimizer_steps: calls of an optimizer's step in the step, the most of any rank.
        grad_scale: loss scale of the backward, None without a scaler.
        grad_scale_state: how gradient rows relate to it: "no_scaler", "observed" (read unscaled), "derived" (read
            scaled and divided), "unknown" (as measured), or "mixed" over optimizers or ranks.
        provenance: "explicit" where the caller opened the step's scope, "implicit" where it was told apart by a
            callable, "mixed" over ranks.
        mode: "train", "eval" or "mixed".
        wall_time_s: Unix time at the end of the step on the lowest rank.
        step_s: duration of the step scope in seconds, the longest of any rank.
        self_s: part of it spent by us on the training thread, the longest of any rank.
        read_bytes: bytes of tensors that were reduced, over all ranks.
        transfer_s: part of ``self_s`` spent bringing rows from the devices to the host, the longest of any rank.
        transfer_bytes: of these rows and histograms, over all ranks.
        num_budget_dropped: observations that ranks left out to keep their budget, over all ranks.
    """

    num_applied: int = 0
    num_skipped: int = 0
    num_unknown: int = 0
    num_micro_batches: int = 0
    num_optimizer_steps: int = 0
    grad_scale: float | None = None
    grad_scale_state: str = "no_scaler"
    provenance: str = "explicit"
    mode: str = "train"
    wall_time_s: float = 0.0
    step_s: float = 0.0
    self_s: float = 0.0
    skipped_ranks: tuple[int, ...] = ()
    read_bytes: int = 0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    num_budget_dropped: int = 0

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> StepFacts:
        """Rebuild the facts from their fields as JSON."""
        return StepFacts(**{**wire, "skipped_ranks": tuple(wire["skipped_ranks"])})


@dataclass(frozen=True, eq=False)
class Packet:
    """Observations of one step by a set of ranks.

    Attributes:
        run_id, segment, step: what the packet belongs to.
        resume_step: first step of the segment, where the session has begun it itself and not at attach.
        world_size: number of ranks of the segment.
        ranks: sorted ranks merged here.
        abstained: rank → reason, for ranks that came without their observations.
        facts: the step's facts.
        definitions: sites that these ranks saw for the first time.
        defined_by: the lowest ranks that gave each of ``definitions``; empty where all of ``ranks`` gave them all.
        reasons: texts that the ``reason`` column indexes.
        findings: JSON objects with at least ``code`` and ``message``.
        descriptor: grid of the histograms.
        sites: uint64 ``[n]``, ascending site ids; the columns below are row-aligned with it.
        ints, floats: ``[n, 8]`` int64 and ``[n, 10]`` float64, see ``telemetry.summary.fields``.
        presence: uint8 ``[n]``, values of ``Presence``.
        reason: int32 ``[n]``, index into ``reasons`` or -1.
        num_scheduled, num_observed, num_contributing: int32 ``[n]``, ranks.
        absmax_rank: int32 ``[n]``, lowest rank that holds ``absmax``, ``NO_RANK`` if there is none.
        num_nonfinite_ranks, first_nonfinite_rank: int32 ``[n]``, ranks with NaN or ±inf, and the lowest of them.
        hist_sites: uint64 ``[h]``, ascending, sites that have a histogram.
        hist_counts: int64 ``[h, descriptor.num_counts]``.
        replicas: fingerprints of the parts that several ranks hold.
    """

    run_id: str
    segment: int
    step: int
    world_size: int
    ranks: tuple[int, ...]
    descriptor: HistogramDescriptor
    sites: NDArray[np.uint64]
    ints: NDArray[np.int64]
    floats: NDArray[np.float64]
    presence: NDArray[np.uint8]
    reason: NDArray[np.int32]
    num_scheduled: NDArray[np.int32]
    num_observed: NDArray[np.int32]
    num_contributing: NDArray[np.int32]
    absmax_rank: NDArray[np.int32]
    num_nonfinite_ranks: NDArray[np.int32]
    first_nonfinite_rank: NDArray[np.int32]
    hist_sites: NDArray[np.uint64]
    hist_counts: NDArray[np.int64]
    facts: StepFacts = field(default_factory=StepFacts)
    abstained: Mapping[int, str] = field(default_factory=dict)
    definitions: tuple[SiteSpec, ...] = ()
    defined_by: tuple[tuple[int, ...], ...] = ()
    reasons: tuple[str, ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    replicas: ReplicaTable = field(default_factory=ReplicaTable.empty)
    resume_step: int | None = None

    @property
    def num_rows(self) -> int:
        """Number of scheduled observations."""
        return len(self.sites)

    def abstaining(self, reason: str) -> Packet:
        """Return the packet without its observations, for a rank that had to drop them; definitions stay."""
        abstained = {**self.abstained, **dict.fromkeys(self.ranks, reason)}
        return replace(_without_rows(self), abstained=abstained)

    def to_bytes(self) -> bytes:
        """Serialise; the inverse is :meth:`from_bytes`."""
        arrays = {**{name: getattr(self, name) for name in _ROW_COLUMNS}, "hist_sites": self.hist_sites}
        header = {
            "run_id": self.run_id,
            "segment": self.segment,
            "resume_step": self.resume_step,
            "step": self.step,
            "world_size": self.world_size,
            "ranks": to_ranges(self.ranks),
            "descriptor": self.descriptor.to_wire(),
            "facts": vars(self.facts),
            "abstained": {str(rank): reason for rank, reason in self.abstained.items()},
            "definitions": [site.to_wire() for site in self.definitions],
            "defined_by": self.defined_by,
            "reasons": list(self.reasons),
            "findings": [dict(finding) for finding in self.findings],
            "num_rows": self.num_rows,
            "num_histograms": len(self.hist_sites),
            "num_replicas": len(self.replicas),
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        replicas = [getattr(self.replicas, name) for name in REPLICA_COLUMNS]
        columns = (np.ascontiguousarray(array) for array in (*arrays.values(), self.hist_counts, *replicas))
        raw = (column.reshape(-1).view(np.uint8).data for column in columns)
        return b"".join((_PREFIX.pack(_MAGIC, PACKET_VERSION, len(text)), text, *raw))

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Packet:
        """Parse what :meth:`to_bytes` wrote.

        Raises:
            PacketVersionError: another version wrote the bytes.
            PacketMalformedError: the bytes are no packet, or are cut.
        """
        header, offset = _parse_header(data)
        try:
            descriptor = HistogramDescriptor.from_wire(header["descriptor"])
            rows, histograms = header["num_rows"], header["num_histograms"]
            shapes = {name: (dtype, (rows, *tail)) for name, (dtype, tail) in _ROW_COLUMNS.items()}
            shapes["hist_sites"] = ("<u8", (histograms,))
            shapes["hist_counts"] = ("<i8", (histograms, descriptor.num_counts))
            for name, (dtype, tail) in REPLICA_COLUMNS.items():
                shapes[f"replicas.{name}"] = (dtype, (header["num_replicas"], *tail))
            columns = _read_columns(data, offset, shapes)
            replicas = ReplicaTable(**{name: columns.pop(f"replicas.{name}") for name in REPLICA_COLUMNS})
            return Packet(
                run_id=header["run_id"],
                segment=header["segment"],
                resume_step=header["resume_step"],
                step=header["step"],
                world_size=header["world_size"],
                ranks=from_ranges(header["ranks"]),
                descriptor=descriptor,
                facts=StepFacts.from_wire(header["facts"]),
                abstained={int(rank): reason for rank, reason in header["abstained"].items()},
                definitions=tuple(SiteSpec.from_wire(site) for site in header["definitions"]),
                defined_by=tuple(tuple(ranks) for ranks in header["defined_by"]),
                reasons=tuple(header["reasons"]),
                findings=tuple(header["findings"]),
                replicas=replicas,
                **columns,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PacketMalformedError(f"the packet header lacks or misuses {error}") from error


def _without_rows(packet: Packet) -> Packet:
    empty = {name: getattr(packet, name)[:0] for name in (*_ROW_COLUMNS, "hist_sites", "hist_counts")}
    return replace(packet, replicas=ReplicaTable.empty(), **empty)


def _parse_header(data: bytes | memoryview) -> tuple[dict[str, Any], int]:
    if len(data) < _PREFIX.size or bytes(data[:4]) != _MAGIC:
        raise PacketMalformedError(f"{len(data)} bytes that do not begin as a packet")
    _, version, header_bytes = _PREFIX.unpack(data[: _PREFIX.size])
    if version != PACKET_VERSION:
        raise PacketVersionError(
            f"the packet has version {version}, this process reads version {PACKET_VERSION}",
            remedy="run the same version of Rankfold on every rank",
        )
    end = _PREFIX.size + header_bytes
    try:
        header = json.loads(bytes(data[_PREFIX.size : end]))
    except ValueError as error:
        raise PacketMalformedError(f"the packet header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise PacketMalformedError("the packet header is not an object")
    return header, end


def _read_columns(
    data: bytes | memoryview, offset: int, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, NDArray[Any]]:
    columns = {}
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape))
        size = count * np.dtype(dtype).itemsize
        if offset + size > len(data):
            raise PacketMalformedError(f"the packet ends inside of column {name}")
        columns[name] = np.frombuffer(data, dtype, count, offset).reshape(shape)
        offset += size
    if offset != len(data):
        raise PacketMalformedError(f"{len(data) - offset} bytes follow the last column")
    return columns


def to_ranges(ranks: Iterable[int]) -> list[list[int]]:
    """Write sorted ranks as half-open ranges, so that the header does not grow with the world."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank:
            ranges[-1][1] = rank + 1
        else:
            ranges.append([rank, rank + 1])
    return ranges


def from_ranges(ranges: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Undo :func:`to_ranges`."""
    return tuple(rank for low, high in ranges for rank in range(low, high))
