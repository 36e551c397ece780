"""What the page's script works on: arrays of every grid, and figures without them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from aggregator.health.update_ratio import UPDATE_TO_WEIGHT
from aggregator.report import plots
from aggregator.report.choice import chosen_columns, ratio_quantiles
from aggregator.report.colours import DIVERGING, MARKS, SEQUENTIAL
from aggregator.report.contents import Contents
from aggregator.report.grid import Grid
from aggregator.report.order import shortened
from aggregator.report.payload import packed_bytes, packed_floats, skeleton
from aggregator.report.ridges import BANDS, BINS_PER_OCTAVE, RIDGE_GAP, RIDGE_OVERLAP, Ridges, shown_share
from aggregator.report.scale import field_label, scale_of

__all__ = ["page_data", "start_kind", "start_ridges"]


def page_data(contents: Contents) -> dict[str, Any]:
    """Return the data of a page, JSON-serialisable."""
    return {
        "palettes": {"sequential": _even(SEQUENTIAL), "diverging": _even(DIVERGING)},
        "marks": [{"code": int(m.code), "word": m.word, "colour": m.colour, "symbol": m.symbol} for m in MARKS],
        "start": {"kind": start_kind(contents), "field": contents.field, "depth": _depth_field(contents)},
        "kinds": {kind: _grid(grid) for kind, grid in contents.grids.items()},
        "profile": {
            "kinds": contents.profile,
            "columns": [chosen_columns(len(contents.grids[kind].step_lo)) for kind in contents.profile],
        },
        "ridges": _ridges(contents),
        "ratio": _ratio(contents),
        "figures": _figures(contents),
    }


def start_kind(contents: Contents) -> str:
    """Return the kind of the first heat map."""
    return next(iter(contents.grids), "")


def start_ridges(contents: Contents) -> Ridges:
    """Return the histograms that are shown first: of the last site of the first kind, where the loss is near."""
    return [ridges for ridges in contents.ridges if ridges.kind == contents.ridges[0].kind][-1]


def _depth_field(contents: Contents) -> str:
    values = np.zeros(0)
    return contents.field if not scale_of(contents.field, values).is_signed else "rms"


def _even(colours: tuple[str, ...]) -> list[list[Any]]:
    return [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]


def _grid(grid: Grid) -> dict[str, Any]:
    fields = {}
    for field, values in grid.fields.items():
        scale = scale_of(field, values)
        fields[field] = {"values": packed_floats(values), "scale": {**vars(scale), "label": field_label(field)}}
    return {
        "names": grid.names,
        "short": [shortened(name) for name in grid.names],
        "tiny": [shortened(name, 14) for name in grid.names],
        "lo": grid.step_lo.tolist(),
        "hi": grid.step_hi.tolist(),
        "edges": grid.edges.tolist(),
        "state": packed_bytes(grid.state),
        "fields": fields,
    }


def _ridges(contents: Contents) -> dict[str, Any]:
    sites, heights, at = [], [], 0
    for one in contents.ridges:
        heights.append(np.ceil(255 * one.heights).astype(np.uint8).ravel())
        shares = [[[float(f"{share:.5g}"), shown_share(share)] for share in row] for row in one.shares.tolist()]
        sites.append({"kind": one.kind, "site": one.site, "steps": one.steps.tolist(), "bins": len(one.x) // 2,
                      "ticks": one.ticks, "at": at, "shares": shares})  # fmt: skip
        at += len(heights[-1])
    start = start_ridges(contents) if contents.ridges else None
    return {
        "bands": BANDS,
        "overlap": RIDGE_OVERLAP,
        # Where the bins of the positive side begin, and their width; those of the other side are mirrored.
        "begin": RIDGE_GAP,
        "width": 1 / min(BINS_PER_OCTAVE, contents.history.descriptor.bins_per_octave),
        "sites": sites,
        "heights": packed_bytes(np.concatenate(heights)) if heights else "",
        "start": {"kind": start.kind, "site": start.site} if start else None,
    }


def _ratio(contents: Contents) -> dict[str, Any] | None:
    if not contents.has_ratio:
        return None
    grid = contents.grids["update"]
    quantiles = [[_number(value) for value in values.tolist()] for _, values, _ in ratio_quantiles(grid)]
    return {"quantiles": quantiles, "start": grid.names[0]}


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if value > 0 else None


def _figures(contents: Contents) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if contents.grids:
        figures["heatmap"] = skeleton(plots.draw_heatmap(contents.grids[start_kind(contents)], contents.field))
    if contents.profile:
        grids = [contents.grids[kind] for kind in contents.profile]
        figures["profile"] = skeleton(plots.draw_depth_profile(grids, _depth_field(contents)))
    if contents.ridges:
        figures["ridges"] = skeleton(plots.draw_histogram_ridgeline(start_ridges(contents)))
    if contents.has_ratio and UPDATE_TO_WEIGHT in contents.grids["update"].fields:
        figures["ratio"] = skeleton(plots.draw_update_to_weight(contents.grids["update"]))
    if len(contents.cost.steps):
        if contents.coverage.ranks:
            figures["coverage"] = _whole(plots.draw_coverage(contents.coverage))
        figures["cost"] = _whole(plots.draw_cost(contents.cost))
    return figures


def _whole(figure: Any) -> dict[str, Any]:
    drawn: dict[str, Any] = json.loads(figure.to_json())
    drawn["layout"].pop("template", None)
    return drawn
