"""Which series there are: one for each site, and a further one wherever a site became another thing.

A site is a name and a kind. If what it names changes its dtype, its placement, its number of elements or the shape of
the whole, the numbers before and after are not of one population: the series ends there, and another one begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from telemetry.sites import SiteSpec

__all__ = ["SERIES", "SeriesCatalogue", "drift_between", "site_spec"]

SERIES: Final = pa.schema(
    [
        ("site", pa.string()),
        ("kind", pa.string()),
        ("series", pa.int32()),
        ("site_id", pa.uint64()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("numel", pa.int64()),
        ("placements", pa.list_(pa.struct([("axis", pa.string()), ("placement", pa.string())]))),
        ("aliases", pa.list_(pa.string())),
        ("estimated", pa.bool_()),
        ("first_step", pa.int64()),
        ("ended_step", pa.int64()),
        ("ended_reason", pa.string()),
    ]
)


def drift_between(before: SiteSpec, after: SiteSpec) -> str:
    """Return what has changed so that the two are not one series, or "".

    A local shape varies with the batch and with the number of ranks; it counts only where every rank holds the whole.
    """
    if changed := before.conflict_with(after):
        return changed
    is_whole = before.numel is not None and all(placement == "replica" for _, placement in before.placements)
    return f"shape {before.shape!r} against {after.shape!r}" if is_whole and before.shape != after.shape else ""


@dataclass(frozen=True)
class SeriesCatalogue:
    """All series of a view of the run.

    Attributes:
        table: one row a series, with schema ``SERIES``, in the order in which they were first seen.
        definitions: site id → (segment, first step, row of ``table``) of everything that was said about it, in order.
    """

    table: pa.Table
    definitions: dict[int, list[tuple[int, int, int]]]

    @staticmethod
    def of(stored: Iterable[dict[str, Any]]) -> SeriesCatalogue:
        """Read the stored rows of the ``sites`` table, with ``segment``, in the order of segment and step."""
        rows: list[dict[str, Any]] = []
        definitions: dict[int, list[tuple[int, int, int]]] = {}
        newest: dict[int, SiteSpec] = {}
        for row in stored:
            site_id, spec = row["site"], site_spec(row)
            said = definitions.setdefault(site_id, [])
            drift = drift_between(newest[site_id], spec) if said else "new"
            if said and not drift:
                rows[said[-1][2]]["aliases"] = list(spec.aliases)
            else:
                if said:
                    rows[said[-1][2]].update(ended_step=row["first_step"], ended_reason=drift)
                rows.append(_series_row(row, len({place for *_, place in said})))
            newest[site_id] = spec
            said.append((row["segment"], row["first_step"], len(rows) - 1 if drift else said[-1][2]))
        return SeriesCatalogue(pa.Table.from_pylist(rows, schema=SERIES), definitions)

    def with_unknown(self, site_ids: NDArray[np.uint64]) -> SeriesCatalogue:
        """Return a catalogue that also has the sites whose definitions were lost, under their numbers."""
        unknown = [site_id for site_id in np.unique(site_ids).tolist() if site_id not in self.definitions]
        if not unknown:
            return self
        blank = {"kind": "unknown", "series": 0, "aliases": [], "shape": [], "placements": [], "estimated": False}
        rows = [{**blank, "site": f"site-{site_id:016x}", "site_id": site_id} for site_id in unknown]
        table = pa.concat_tables([self.table, pa.Table.from_pylist(rows, schema=SERIES)])
        said = {site_id: [(0, 0, self.table.num_rows + i)] for i, site_id in enumerate(unknown)}
        return SeriesCatalogue(table, {**self.definitions, **said})

    def places(
        self, site_ids: NDArray[np.uint64], segments: NDArray[np.int32], steps: NDArray[np.int64]
    ) -> NDArray[np.intp]:
        """Return for each observation the row of ``table`` that it belongs to."""
        known, inverse = np.unique(site_ids, return_inverse=True)
        said = [self.definitions[site_id] for site_id in known.tolist()]
        places = np.array([entries[-1][2] for entries in said], np.intp)[inverse]
        for i, entries in enumerate(said):
            if entries[0][2] != entries[-1][2]:
                rows = np.flatnonzero(inverse == i)
                places[rows] = [_place(entries, int(segments[row]), int(steps[row])) for row in rows]
        return places


def _place(entries: list[tuple[int, int, int]], segment: int, step: int) -> int:
    before = [place for at_segment, at_step, place in entries if (at_segment, at_step) <= (segment, step)]
    return before[-1] if before else entries[0][2]


def site_spec(row: Mapping[str, Any]) -> SiteSpec:
    """Return the definition that a row of the ``sites`` table holds."""
    placements = tuple((entry["axis"], entry["placement"]) for entry in row["placements"] or ())
    shape, aliases = tuple(row["shape"]), tuple(row["aliases"])
    return SiteSpec(row["name"], row["kind"], row["dtype"], shape, row["numel"], placements, aliases, row["estimated"])


def _series_row(row: dict[str, Any], number: int) -> dict[str, Any]:
    return {**row, "site": row["name"], "site_id": row["site"], "series": number}
