"""``rankfold compare``: two runs aligned by site and step, and where they first differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
import typer
from numpy.typing import NDArray

from aggregator.history import History
from launch.commands.shared import (
    EXIT_FOUND,
    JsonOption,
    KindOption,
    RunArgument,
    SalvageOption,
    console,
    open_run,
    plain_table,
    print_json,
    print_losses,
    progress,
    salvage_remedy,
)
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS

__all__ = ["Comparison", "compare", "compare_runs"]

# What has to be alike for two records to be of one experiment.
_IDENTITY: Final = ("model", "model_fingerprint", "world_size", "layout", "every", "hist_every", "selection", "torch")
_COLUMNS: Final = ("step", "kind", "site", "presence", *INT_FIELDS, *FLOAT_FIELDS)
_BATCH_STEPS: Final = 256


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and where they part.

    Attributes:
        identity: what differs of their run records, field → (left, right).
        num_steps, num_sites: that both have; only_left, only_right: kind and site that one alone has.
        steps_left, steps_right: number of steps that one alone has.
        num_rows, num_different: rows of common sites and steps, and those with a field that differs.
        first_step: the smallest step at which a row differs, None if there is none.
        differences: rows that differ at that step in the order of sites: kind, site, field, left, right, relative.
        largest: by field, the largest relative difference over all steps and the row that has it.
    """

    identity: Mapping[str, tuple[Any, Any]]
    num_steps: int
    num_sites: int
    only_left: tuple[tuple[str, str], ...]
    only_right: tuple[tuple[str, str], ...]
    steps_left: int
    steps_right: int
    num_rows: int
    num_different: int
    first_step: int | None
    differences: tuple[Mapping[str, Any], ...]
    largest: Mapping[str, Mapping[str, Any]]

    @property
    def is_same(self) -> bool:
        """Whether all that both recorded is equal, and neither has recorded what the other has not."""
        return not (self.num_different or self.only_left or self.only_right or self.steps_left or self.steps_right)


def compare(
    left: RunArgument,
    right: Annotated[Path, typer.Argument(help="Run directory to compare with.", show_default=False)],
    kind: KindOption = None,
    rtol: Annotated[
        float, typer.Option(min=0.0, help="Floats may differ by this much, relative; counts never.")
    ] = 1e-6,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Differing sites to show.")] = 10,
    as_json: JsonOption = False,
    salvage: SalvageOption = False,
) -> None:
    """Compare two runs by site and step; exits 3 where they differ."""
    with salvage_remedy(salvage):
        histories = open_run(left, salvage=salvage), open_run(right, salvage=salvage)
        found = compare_runs(*histories, kind=kind, rtol=rtol)
    for history in histories:
        print_losses(history)
    if as_json:
        print_json({"same": found.is_same, **vars(found)})
    else:
        _print(found, number)
    if not found.is_same:
        raise typer.Exit(EXIT_FOUND)


def compare_runs(left: History, right: History, *, kind: str | None = None, rtol: float = 1e-6) -> Comparison:
    """Compare the shown rows of two runs: counts and presence exactly, floats to ``rtol`` relative.

    Two NaN are equal, and so are two rows without numbers that have the same presence.
    """
    steps = [history.coverage()["step"].to_pylist() for history in (left, right)]
    sites = [_sites(history, kind) for history in (left, right)]
    common_steps = sorted(set(steps[0]) & set(steps[1]))
    common_sites = [site for site in sites[0] if site in set(sites[1])]
    tally = _Tally(common_sites, rtol)
    with progress("comparing", len(common_steps)) as advance:
        for start in range(0, len(common_steps), _BATCH_STEPS):
            part = common_steps[start : start + _BATCH_STEPS]
            tally.add(*(_rows(history, kind, part) for history in (left, right)))
            advance(len(part))
    return Comparison(
        identity=_identity(left, right),
        num_steps=len(common_steps),
        num_sites=len(common_sites),
        only_left=tuple(site for site in sites[0] if site not in set(sites[1])),
        only_right=tuple(site for site in sites[1] if site not in set(sites[0])),
        steps_left=len(set(steps[0]) - set(steps[1])),
        steps_right=len(set(steps[1]) - set(steps[0])),
        num_rows=tally.num_rows,
        num_different=tally.num_different,
        first_step=tally.first_step,
        differences=tuple(tally.differences),
        largest=tally.largest,
    )


def _sites(history: History, kind: str | None) -> list[tuple[str, str]]:
    table = history.sites()
    pairs = zip(table["kind"].to_pylist(), table["site"].to_pylist(), strict=True)
    return list(dict.fromkeys(pair for pair in pairs if kind in (None, pair[0])))


def _rows(history: History, kind: str | None, steps: list[int]) -> pa.Table:
    return history.observations(kinds=kind, steps=steps, columns=list(_COLUMNS))


def _identity(left: History, right: History) -> dict[str, tuple[Any, Any]]:
    records = left.manifest["run"], right.manifest["run"]
    pairs = {name: (records[0].get(name), records[1].get(name)) for name in _IDENTITY}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class _Tally:
    """Gathers differences, batch of steps after batch of steps."""

    def __init__(self, sites: list[tuple[str, str]], rtol: float) -> None:
        self._place = {site: i for i, site in enumerate(sites)}
        self._sites, self._rtol = sites, rtol
        self.num_rows = self.num_different = 0
        self.first_step: int | None = None
        self.differences: list[dict[str, Any]] = []
        self.largest: dict[str, dict[str, Any]] = {}

    def add(self, left: pa.Table, right: pa.Table) -> None:
        left_keys, right_keys = self._keys(left), self._keys(right)
        keys, mine, its = np.intersect1d(left_keys, right_keys, return_indices=True)
        mine, its, keys = mine[keys >= 0], its[keys >= 0], keys[keys >= 0]
        # A row that one run alone has at a step that both have is a difference, too.
        lonely = np.setxor1d(left_keys[left_keys >= 0], right_keys[right_keys >= 0])
        self.num_rows += len(keys) + len(lonely)
        different = np.zeros(len(keys), dtype=bool)
        found: list[tuple[int, str, Any, Any, float | None]] = []
        words = [table["presence"].cast(pa.string()).to_numpy(zero_copy_only=False) for table in (left, right)]
        unequal = words[0][mine] != words[1][its]
        different |= unequal
        found += [
            (int(keys[i]), "presence", words[0][mine[i]], words[1][its[i]], None) for i in np.flatnonzero(unequal)
        ]
        for name in (*INT_FIELDS, *FLOAT_FIELDS):
            a, b = (table[name].to_numpy().astype(np.float64) for table in (left, right))
            relative = _relative(a[mine], b[its])
            if name in INT_FIELDS:
                # As integers: a float64 does not tell two large counts apart.
                unequal = _counts(left[name])[mine] != _counts(right[name])[its]
            else:
                unequal = relative > self._rtol
            different |= unequal
            if unequal.any():
                self._note_largest(name, keys, relative, a[mine], b[its])
            found += [
                (int(keys[i]), name, float(a[mine[i]]), float(b[its[i]]), float(relative[i]))
                for i in np.flatnonzero(unequal)
            ]
        found += [(int(key), "scheduled", bool(key in left_keys), bool(key in right_keys), None) for key in lonely]
        self.num_different += int(different.sum()) + len(lonely)
        self._note_first(found)

    def _keys(self, table: pa.Table) -> NDArray[np.int64]:
        """Return step times number of sites plus place of the site, -1 for a site that is not common."""
        kinds, sites = (table[name].cast(pa.string()).to_pylist() for name in ("kind", "site"))
        places = np.array([self._place.get(pair, -1) for pair in zip(kinds, sites, strict=True)], dtype=np.int64)
        keys = table["step"].to_numpy() * np.int64(max(1, len(self._sites))) + places
        return np.where(places < 0, -1, keys)

    def _named(self, key: int) -> dict[str, Any]:
        step, place = divmod(key, max(1, len(self._sites)))
        kind, site = self._sites[place]
        return {"step": step, "kind": kind, "site": site}

    def _note_largest(
        self, name: str, keys: NDArray[np.int64], relative: NDArray[np.float64], a: NDArray[Any], b: NDArray[Any]
    ) -> None:
        at = int(np.argmax(relative))
        if float(relative[at]) > self.largest.get(name, {"relative": 0.0})["relative"]:
            row = {"left": float(a[at]), "right": float(b[at]), "relative": float(relative[at])}
            self.largest[name] = {**self._named(int(keys[at])), **row}

    def _note_first(self, found: list[tuple[int, str, Any, Any, float | None]]) -> None:
        if self.first_step is not None or not found:
            return
        named = [
            {**self._named(key), "field": field, "left": a, "right": b, "relative": relative}
            for key, field, a, b, relative in sorted(found, key=lambda one: one[0])
        ]
        self.first_step = named[0]["step"]
        self.differences = [row for row in named if row["step"] == self.first_step]


def _counts(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return a column of counts as it is stored; a row without numbers has -1, which no count is."""
    counts: NDArray[np.int64] = column.fill_null(-1).to_numpy()
    return counts


def _relative(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return |a − b| / max(|a|, |b|): 0 where both are equal or both missing, inf where one is missing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(relative), np.inf, relative))


def _print(found: Comparison, number: int) -> None:
    out = console()
    for name, (a, b) in found.identity.items():
        out.print(f"{name}: {a} against {b}")
    out.print(f"{found.num_sites} sites and {found.num_steps} steps are in both")
    for side, sites, steps in (
        ("left", found.only_left, found.steps_left),
        ("right", found.only_right, found.steps_right),
    ):
        if sites:
            named = ", ".join(f"{kind} {site}" for kind, site in sites[:5]) + (", …" if len(sites) > 5 else "")
            out.print(f"only on the {side}: {len(sites)} sites: {named}")
        if steps:
            out.print(f"only on the {side}: {steps} steps")
    if found.first_step is None:
        out.print(f"all {found.num_rows:,} rows that both have are equal")
        return
    out.print(f"{found.num_different:,} of {found.num_rows:,} rows differ, the first ones at step {found.first_step}")
    names: tuple[str, ...] = ("kind", "site", "field", "left", "right", "relative")
    by_site: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in found.differences:
        by_site.setdefault((row["kind"], row["site"]), row)
    rows = [tuple(row[name] for name in names) for row in list(by_site.values())[:number]]
    title = f"\nAt step {found.first_step}, {len(by_site)} sites, the first field of each"
    out.print(plain_table(title, names, rows, right=names[3:]))
    names = ("field", "step", "kind", "site", "left", "right", "relative")
    rows = [(name, *(row[key] for key in names[1:])) for name, row in found.largest.items()]
    out.print(plain_table("\nLargest difference of each field", names, rows, right=("step", *names[4:])))
