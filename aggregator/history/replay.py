"""Recorded steps as sinks receive them, so that a record can be shown elsewhere after the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aggregator.catalogue import MergedStep
from aggregator.history.schema import OBSERVATIONS
from aggregator.history.series import SeriesCatalogue, site_spec
from telemetry.packet import NO_RANK, Packet, StepFacts
from telemetry.presence import Presence
from telemetry.sites import SiteSpec
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS
from telemetry.summary.histogram import HistogramDescriptor
from telemetry.summary.merge import identity

__all__ = ["Replay"]

_FACTS: Final = tuple(field.name for field in fields(StepFacts))


class Replay:
    """Makes merged steps of stored rows; one for a pass over a run.

    The fingerprints of replicas are not in a record; what they showed is among the findings.
    """

    def __init__(self, run_id: str, descriptor: HistogramDescriptor, catalogue: SeriesCatalogue) -> None:
        """Begin a pass; ``catalogue`` has every site of the rows to come."""
        self._run_id = run_id
        self._descriptor = descriptor
        self._catalogue = catalogue
        self._specs: dict[int, SiteSpec] = {}
        self._seen: set[int] = set()

    def steps(self, steps: pa.Table, findings: pa.Table, parts: Iterable[pa.Table]) -> Iterator[MergedStep]:
        """Yield the steps, ascending.

        Args:
            steps, findings: rows of these tables; each step comes once.
            parts: stored rows of observations with ``segment``, each step whole in one part, steps ascending.
        """
        told: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
        for row in findings.to_pylist():
            told.setdefault((row["segment"], row["step"]), []).append(json.loads(row["details"]))
        rows = chain.from_iterable(map(_by_step, parts))
        step, observations = next(rows, (None, None))
        for row in steps.to_pylist():
            mine = observations if step == row["step"] else None
            yield self._step(row, told.get((row["segment"], row["step"]), []), mine)
            if mine is not None:
                step, observations = next(rows, (None, None))

    def _step(
        self, row: Mapping[str, Any], findings: list[Mapping[str, Any]], observations: pa.Table | None
    ) -> MergedStep:
        rows = OBSERVATIONS.empty_table() if observations is None else observations
        rows = rows.take(np.argsort(rows["site"].to_numpy(), kind="stable")).combine_chunks()
        sites = self._sites(rows["site"].to_numpy(), row["segment"], row["step"])
        new = tuple(site for site in sites if site.site_id not in self._seen)
        self._seen.update(site.site_id for site in new)
        missing = dict(zip(row["missing_ranks"], row["missing_reasons"], strict=True))
        abstained = {rank: missing[rank] for rank in row["abstained_ranks"]}
        texts = rows["reason"].to_pylist()
        reasons = tuple(dict.fromkeys(text for text in texts if text is not None))
        counted = np.flatnonzero(rows["hist_bins"].is_valid().to_numpy())
        ints, floats = _numbers(rows)
        packet = Packet(
            run_id=self._run_id,
            segment=row["segment"],
            step=row["step"],
            world_size=row["world_size"],
            ranks=tuple(rank for rank in range(row["world_size"]) if rank not in missing or rank in abstained),
            descriptor=self._descriptor,
            sites=rows["site"].to_numpy(),
            presence=rows["presence"].to_numpy(),
            reason=np.array([-1 if text is None else reasons.index(text) for text in texts], np.int32),
            absmax_rank=_or_no_rank(rows["absmax_rank"]),
            first_nonfinite_rank=_or_no_rank(rows["first_nonfinite_rank"]),
            hist_sites=rows["site"].to_numpy()[counted],
            hist_counts=_histograms(rows, counted, self._descriptor),
            facts=_facts(row),
            abstained=abstained,
            definitions=new,
            reasons=reasons,
            findings=tuple(findings),
            ints=ints,
            floats=floats,
            num_scheduled=_counts(rows["num_scheduled"]),
            num_observed=_counts(rows["num_observed"]),
            num_contributing=_counts(rows["num_contributing"]),
            num_nonfinite_ranks=_counts(rows["num_nonfinite_ranks"]),
        )
        return MergedStep(packet=packet, sites=sites, new_sites=new, missing=missing, merge_s=row["merge_s"])

    def _sites(self, site_ids: NDArray[np.uint64], segment: int, step: int) -> tuple[SiteSpec, ...]:
        if not len(site_ids):
            return ()
        places = self._catalogue.places(site_ids, np.full(len(site_ids), segment), np.full(len(site_ids), step))
        for place in np.unique(places).tolist():
            if place not in self._specs:
                row = self._catalogue.table.slice(place, 1).to_pylist()[0]
                self._specs[place] = site_spec({**row, "name": row["site"]})
        return tuple(self._specs[place] for place in places.tolist())


def _by_step(part: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    rows = part.combine_chunks()
    steps, starts = np.unique(rows["step"].to_numpy(), return_index=True)
    for step, start, end in zip(steps.tolist(), starts, [*starts[1:], rows.num_rows], strict=True):
        yield step, rows.slice(start, end - start)


def _numbers(rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the packed rows; null is the identity of merge, as it was when the row was merged."""
    ints, floats = identity(rows.num_rows)
    observed = rows["presence"].to_numpy() == Presence.OBSERVED
    packed: tuple[tuple[NDArray[Any], tuple[str, ...]], ...] = ((ints, INT_FIELDS), (floats, FLOAT_FIELDS))
    for columns, names in packed:
        for i, name in enumerate(names):
            there = observed & rows[name].is_valid().to_numpy()
            columns[there, i] = rows[name].to_numpy()[there]
    return ints, floats


def _counts(column: pa.ChunkedArray) -> NDArray[np.int32]:
    counts: NDArray[np.int32] = column.fill_null(0).to_numpy()
    return counts


def _or_no_rank(column: pa.ChunkedArray) -> NDArray[np.int32]:
    ranks: NDArray[np.int32] = column.fill_null(NO_RANK).to_numpy()
    return ranks


def _histograms(rows: pa.Table, where: NDArray[np.intp], descriptor: HistogramDescriptor) -> NDArray[np.int64]:
    counts = np.zeros((len(where), descriptor.num_counts), dtype=np.int64)
    for i, row in enumerate(where.tolist()):
        counts[i, rows["hist_bins"][row].values.to_numpy()] = rows["hist_counts"][row].values.to_numpy()
    return counts


def _facts(row: Mapping[str, Any]) -> StepFacts:
    # What a row of an older version lacks is null, and has the default of the facts.
    known = {name: row[name] for name in _FACTS if row[name] is not None or name == "grad_scale"}
    return StepFacts.from_wire({**known, "skipped_ranks": row["skipped_ranks"]})
