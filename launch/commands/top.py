"""``rankfold top``: what moved most, what is dead, what is not finite and on which rank."""

from __future__ import annotations

from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer
from numpy.typing import NDArray

from aggregator.health import Thresholds
from aggregator.health.update_ratio import ratio_of
from aggregator.history import History
from launch.commands.shared import (
    JsonOption,
    KindOption,
    RunArgument,
    SalvageOption,
    console,
    open_run,
    plain_table,
    print_json,
    print_losses,
    salvage_remedy,
)

__all__ = ["rank_sites", "top"]

_COLUMNS: Final = (
    "step", "kind", "site", "presence", "rms", "absmax", "zero_fraction", "total", "finite", "absmax_rank",
    "num_nonfinite_ranks", "first_nonfinite_rank",
)  # fmt: skip


def top(
    run: RunArgument,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Sites in each list.")] = 10,
    kind: KindOption = None,
    last: Annotated[int | None, typer.Option(min=1, help="Only the last so many recorded steps.")] = None,
    as_json: JsonOption = False,
    salvage: SalvageOption = False,
) -> None:
    """Show which sites moved most, which are dead, and which hold values that are not finite, by rank."""
    with salvage_remedy(salvage):
        history = open_run(run, salvage=salvage)
        found = rank_sites(history, number=number, kind=kind, last=last)
    print_losses(history)
    if as_json:
        print_json(found)
    else:
        _print(found)


def rank_sites(
    history: History, *, number: int = 10, kind: str | None = None, last: int | None = None
) -> dict[str, Any]:
    """Return the lists that the command shows, JSON-serialisable.

    Args:
        number: sites in each list.
        kind: only sites of this kind, None for all.
        last: only the last so many recorded steps, None for all.
    """
    steps = history.coverage()["step"].to_pylist()
    asked = steps if last is None else steps[-last:]
    if not asked:
        return {"steps": [], "moved": [], "dead": [], "nonfinite": [], "updates": [], "ranks": []}
    rows = history.observations(kinds=kind, steps=range(asked[0], asked[-1] + 1), columns=list(_COLUMNS))
    rows = rows.filter(pc.equal(rows["presence"], "observed")).combine_chunks()
    groups = _Groups(rows)
    return {
        "steps": [asked[0], asked[-1]],
        "moved": groups.moved()[:number],
        "dead": groups.dead(Thresholds().dead_zero_fraction)[:number],
        "nonfinite": groups.nonfinite()[:number],
        "updates": groups.updates()[:number],
        "ranks": groups.ranks()[:number],
    }


class _Groups:
    """The observed rows, grouped by site in one sort."""

    def __init__(self, rows: pa.Table) -> None:
        kinds, sites = (rows[name].cast(pa.string()).combine_chunks().dictionary_encode() for name in ("kind", "site"))
        self._kind_names, self._site_names = kinds.dictionary.to_pylist(), sites.dictionary.to_pylist()
        keys = kinds.indices.to_numpy().astype(np.int64) * max(1, len(self._site_names)) + sites.indices.to_numpy()
        self._columns: dict[str, NDArray[Any]] = {
            name: rows[name].to_numpy() for name in (*_COLUMNS[:1], *_COLUMNS[4:])
        }
        order = np.lexsort((self._columns["step"], keys))
        self._columns = {name: values[order] for name, values in self._columns.items()}
        self._keys, self._starts = np.unique(keys[order], return_index=True)
        self._ends = np.append(self._starts[1:], len(keys))

    def _parts(self, name: str) -> list[NDArray[Any]]:
        return [self._columns[name][a:b] for a, b in zip(self._starts, self._ends, strict=True)]

    def _name(self, index: int) -> dict[str, Any]:
        kind, site = divmod(int(self._keys[index]), max(1, len(self._site_names)))
        return {"kind": self._kind_names[kind], "site": self._site_names[site]}

    def moved(self) -> list[dict[str, Any]]:
        """Return the sites by the ratio of their largest to their smallest rms."""
        found = []
        for i, values in enumerate(self._parts("rms")):
            known = values[np.isfinite(values)]
            if len(known) > 1 and known.max() > 0:
                low, high = float(known.min()), float(known.max())
                ratio = high / low if low else None
                found.append(
                    {**self._name(i), "lowest_rms": low, "highest_rms": high, "ratio": ratio, "steps": len(known)}
                )
        return sorted(found, key=lambda row: -(row["ratio"] or float("inf")))

    def dead(self, limit: float) -> list[dict[str, Any]]:
        """Return the sites that are zero in at least the fraction ``limit`` of their elements at their last step."""
        found = [
            {**self._name(i), "zero_fraction": float(values[-1]), "at_step": int(steps[-1])}
            for i, (values, steps) in enumerate(zip(self._parts("zero_fraction"), self._parts("step"), strict=True))
            if values[-1] >= limit
        ]
        return sorted(found, key=lambda row: -row["zero_fraction"])

    def nonfinite(self) -> list[dict[str, Any]]:
        """Return the sites with NaN or ±inf by their first such step, with the ranks that had them there."""
        found = []
        names = ("total", "finite", "step", "num_nonfinite_ranks", "first_nonfinite_rank")
        for i, (total, finite, steps, ranks, first) in enumerate(zip(*map(self._parts, names), strict=True)):
            bad = np.flatnonzero(total > finite)
            if len(bad):
                at = bad[0]
                found.append(
                    {
                        **self._name(i),
                        "first_step": int(steps[at]),
                        "first_rank": int(first[at]) if np.isfinite(first[at]) else None,
                        "num_ranks": int(ranks[at]),
                        "num_steps": len(bad),
                        "num_elements": int((total - finite)[bad].sum()),
                    }
                )
        return sorted(found, key=lambda row: (row["first_step"], -row["num_elements"]))

    def updates(self) -> list[dict[str, Any]]:
        """Return the weights by how much of their own size the last step that has both changed them."""
        place = {(row["kind"], row["site"]): i for i, row in enumerate(map(self._name, range(len(self._keys))))}
        rms, steps = self._parts("rms"), self._parts("step")
        found = []
        for (kind, site), i in place.items():
            weight = place.get(("parameter", site))
            if kind != "update" or weight is None:
                continue
            common, mine, its = np.intersect1d(steps[i], steps[weight], return_indices=True)
            ratios = ratio_of(rms[i][mine], rms[weight][its])
            known = np.flatnonzero(np.isfinite(ratios))
            if len(known):
                at = known[-1]
                found.append({"site": site, "update_to_weight": float(ratios[at]), "at_step": int(common[at])})
        return sorted(found, key=lambda row: -row["update_to_weight"])

    def ranks(self) -> list[dict[str, Any]]:
        """Return how often each rank was the first with a value that is not finite, and held the largest magnitude."""
        first, largest = (self._columns[name] for name in ("first_nonfinite_rank", "absmax_rank"))
        counts = {
            "first_nonfinite": np.unique(first[np.isfinite(first)], return_counts=True),
            "holds_absmax": np.unique(largest[np.isfinite(largest)], return_counts=True),
        }
        by_rank: dict[int, dict[str, int]] = {}
        for name, (ranks, numbers) in counts.items():
            for rank, count in zip(ranks.tolist(), numbers.tolist(), strict=True):
                by_rank.setdefault(int(rank), dict.fromkeys(counts, 0))[name] = count
        rows = [{"rank": rank, **found} for rank, found in by_rank.items()]
        return sorted(rows, key=lambda row: (-row["first_nonfinite"], row["rank"]))


_LISTS: Final = (
    ("moved", "Moved most", ("kind", "site", "lowest_rms", "highest_rms", "ratio", "steps")),
    ("updates", "Updated most, as a part of the weight", ("site", "update_to_weight", "at_step")),
    ("dead", "Dead: nearly all zero at the last step", ("kind", "site", "zero_fraction", "at_step")),
    (
        "nonfinite",
        "Not finite",
        ("kind", "site", "first_step", "first_rank", "num_ranks", "num_steps", "num_elements"),
    ),
    ("ranks", "By rank", ("rank", "first_nonfinite", "holds_absmax")),
)


def _print(found: dict[str, Any]) -> None:
    out = console()
    if not found["steps"]:
        out.print("no step is recorded yet")
        return
    out.print(f"steps {found['steps'][0]} to {found['steps'][1]}")
    for key, title, columns in _LISTS:
        if not found[key]:
            out.print(f"\n[bold]{title}[/bold]  none")
            continue
        rows = [tuple(row[name] for name in columns) for row in found[key]]
        names = [name.replace("_", " ") for name in columns]
        right = [name for name in names if name not in ("kind", "site")]
        out.print(plain_table(f"\n{title}", names, rows, right=right))
