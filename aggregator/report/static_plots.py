"""Charts of a run as matplotlib figures, for files, and for readers of the report who run no scripts.

The names are those of :mod:`aggregator.report.plots`. Figures are free of pyplot: nothing is shown or kept, whoever
gets one calls ``savefig``. ``dark`` draws for a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.health.update_ratio import UPDATE_TO_WEIGHT
from aggregator.history import History
from aggregator.report.account import Cost, RankCoverage, read_cost, read_coverage
from aggregator.report.choice import MAX_COLUMNS, chosen_columns, profile_kinds, ratio_quantiles, tick_rows
from aggregator.report.colours import COVERAGE, DIVERGING, MARKS, SEQUENTIAL, SERIES, cell_codes
from aggregator.report.grid import Grid, read_grid, time_spans
from aggregator.report.optional import required
from aggregator.report.order import shortened
from aggregator.report.ridges import BANDS, RIDGE_OVERLAP, Ridges, read_one_ridges, shown_share
from aggregator.report.scale import field_label, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "cost",
    "coverage",
    "depth_profile",
    "draw_cost",
    "draw_coverage",
    "draw_depth_profile",
    "draw_heatmap",
    "draw_histogram_ridgeline",
    "draw_update_to_weight",
    "heatmap",
    "histogram_ridgeline",
    "update_to_weight",
]

_WIDTH: Final = 9.6
_INK: Final = {False: "#1d2430", True: "#e4e8ee"}
_PAPER: Final = {False: "#ffffff", True: "#171b22"}


def heatmap(history: History, *, kind: str = "activation", field: str = "rms", dark: bool = False) -> Figure:
    """See :func:`aggregator.report.plots.heatmap`."""
    grid = read_grid(history, kind, [field], every=time_spans(history, MAX_COLUMNS).every)
    return draw_heatmap(grid, field, dark=dark)


def depth_profile(history: History, *, field: str = "rms", dark: bool = False) -> Figure:
    """See :func:`aggregator.report.plots.depth_profile`."""
    every = time_spans(history, MAX_COLUMNS).every
    grids = [read_grid(history, kind, [field], every=every) for kind in profile_kinds(history)]
    return draw_depth_profile(grids, field, dark=dark)


def histogram_ridgeline(history: History, site: str, kind: str = "activation", *, dark: bool = False) -> Figure:
    """See :func:`aggregator.report.plots.histogram_ridgeline`."""
    return draw_histogram_ridgeline(read_one_ridges(history, site, kind), dark=dark)


def update_to_weight(history: History, site: str | None = None, *, dark: bool = False) -> Figure:
    """See :func:`aggregator.report.plots.update_to_weight`."""
    grid = read_grid(history, "update", [UPDATE_TO_WEIGHT], every=time_spans(history, MAX_COLUMNS).every)
    return draw_update_to_weight(grid, site, dark=dark)


def coverage(history: History, *, dark: bool = False) -> Figure:
    """See :func:`aggregator.report.plots.coverage`."""
    return draw_coverage(read_coverage(history), dark=dark)


def cost(history: History, *, dark: bool = False) -> Figure:
    """See :func:`aggregator.report.plots.cost`."""
    return draw_cost(read_cost(history), dark=dark)


def draw_heatmap(grid: Grid, field: str, *, dark: bool = False) -> Figure:
    """Draw one field of a grid as cells, states that are no number in colours of their own."""
    colours = required("matplotlib.colors")
    figure, (axes,) = _figure(min(9.0, 1.5 + 0.12 * len(grid.names)), dark)
    values, codes = grid.fields[field], cell_codes(grid, field)
    scale = scale_of(field, values)
    edges, rows = grid.edges, np.arange(len(grid.names) + 1) - 0.5
    named = colours.LinearSegmentedColormap.from_list("field", DIVERGING if scale.is_signed else SEQUENTIAL)
    shown = np.where(np.isin(codes, [mark.code for mark in MARKS]), np.nan, scale.transform(values))
    mesh = axes.pcolormesh(edges, rows, shown, cmap=named, vmin=scale.low, vmax=scale.high, rasterized=True)
    marked = np.where(np.isin(codes, [mark.code for mark in MARKS]), codes.astype(float), np.nan)
    special = colours.ListedColormap([mark.colour for mark in MARKS])
    bounds = MARKS[0].code - 0.5, MARKS[-1].code + 0.5
    axes.pcolormesh(edges, rows, marked, cmap=special, vmin=bounds[0], vmax=bounds[1], rasterized=True)
    bar = figure.colorbar(mesh, ax=axes, label=field_label(field), pad=0.01, fraction=0.03)
    bar.set_ticks([place for place, _ in scale.ticks], labels=[word for _, word in scale.ticks])
    bar.outline.set_visible(False)
    _ink(bar.ax, _INK[dark])
    named_rows = tick_rows(len(grid.names), 48)
    axes.set_yticks(named_rows, [shortened(grid.names[row]) for row in named_rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="optimizer step", title=f"{grid.kind}: {field}")
    _add_key(axes, codes)
    return figure


def draw_depth_profile(grids: Sequence[Grid], field: str, *, dark: bool = False) -> Figure:
    """Draw one field of each grid over depth, at five columns of each."""
    num = max(1, len(grids))
    figure, panels = _figure(1.2 + 3.2 * num, dark, rows=num)
    for axes, grid in zip(panels, grids, strict=False):
        places = np.arange(len(grid.names))
        columns = chosen_columns(len(grid.step_lo))
        for i, column in enumerate(columns):
            values = grid.fields[field][:, column]
            label = grid.span(column)
            axes.plot(places, _positive(values), color=SERIES[i], marker=".", lw=1.3, ms=4, label=label)
        _log(axes, grid.fields[field][:, columns])
        _add_strip(axes, places, cell_codes(grid, field)[:, columns].max(1, initial=0))
        rows = tick_rows(len(grid.names), 30)
        axes.set_xticks(rows, [shortened(grid.names[row], 22) for row in rows], rotation=60, ha="right", fontsize=7)
        axes.set(ylabel=f"{grid.kind} {field}", xlim=(-0.5, len(places) - 0.5))
        axes.grid(alpha=0.25)
    panels[0].legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, frameon=False, fontsize=8, labelcolor=_INK[dark]
    )
    return figure


def draw_histogram_ridgeline(ridges: Ridges, *, dark: bool = False) -> Figure:
    """Draw the histograms of one site, and a table of the shares outside of their bins."""
    figure, (left, right) = _figure(1.6 + 0.42 * len(ridges.steps), dark, columns=2, width_ratios=[3, 1.3], sharey=True)
    num = len(ridges.steps)
    x = np.concatenate((ridges.x[:1], ridges.x, ridges.x[-1:]))
    for i in reversed(range(num)):
        y = i + RIDGE_OVERLAP * np.concatenate(([0.0], ridges.heights[i], [0.0]))
        left.fill_between(x, i, y, step="mid", color=SERIES[0], alpha=0.4, zorder=num - i)
        left.step(x, y, where="mid", color=SERIES[0], lw=0.9, zorder=num - i)
    left.set_yticks(range(num), [str(step) for step in ridges.steps])
    left.set_xticks(
        [place for place, _ in ridges.ticks],
        [word.replace("<sup>", "$^{").replace("</sup>", "}$") for _, word in ridges.ticks],
    )
    left.set(
        xlabel="value of an element (log2, both signs)",
        ylabel="optimizer step",
        title=f"{ridges.kind}: {shortened(ridges.site, 48)}",
    )
    for (i, band), share in np.ndenumerate(ridges.shares):
        colour = MARKS[1].colour if share > 0 else _INK[dark]
        right.text(band, i, shown_share(float(share)), ha="center", va="center", fontsize=7, color=colour)
    right.set_xticks(range(len(BANDS)), BANDS, fontsize=7, rotation=30)
    right.set(xlim=(-0.6, len(BANDS) - 0.4), xlabel="share of all elements", ylim=(-0.6, num + 1.2))
    right.tick_params(axis="y", left=False)
    return figure


def draw_update_to_weight(grid: Grid, site: str | None = None, *, dark: bool = False) -> Figure:
    """Draw quantiles of the ratio over all matrices, and the ratio of one site."""
    figure, (axes,) = _figure(3.8, dark)
    quantiles = ratio_quantiles(grid)
    for i, (name, values, _) in enumerate(quantiles):
        style: dict[str, Any] = {"lw": 2.0 if i == 2 else 0.9, "ls": ":" if i in (0, 4) else "-"}
        axes.plot(grid.centers, _positive(values), color=SERIES[0], label=f"{name} of all matrices", **style)
    axes.fill_between(grid.centers, _positive(quantiles[1][1]), _positive(quantiles[3][1]), color=SERIES[0], alpha=0.18)
    row = grid.names.index(site) if site is not None else 0
    ratios = grid.fields[UPDATE_TO_WEIGHT]
    axes.plot(
        grid.centers, _positive(ratios[row]), color=SERIES[1], lw=1.5, marker=".", label=shortened(grid.names[row])
    )
    _log(axes, ratios)
    _add_strip(axes, grid.centers, cell_codes(grid, UPDATE_TO_WEIGHT)[row])
    axes.set(xlabel="optimizer step", ylabel=field_label(UPDATE_TO_WEIGHT))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=8, labelcolor=_INK[dark])
    return figure


def draw_coverage(seen: RankCoverage, *, dark: bool = False) -> Figure:
    """Draw which ranks are in which steps."""
    colours = required("matplotlib.colors")
    figure, (axes,) = _figure(max(1.8, min(6.0, 1.2 + 0.16 * len(seen.ranks))), dark)
    named = colours.ListedColormap([colour for *_, colour in COVERAGE])
    axes.pcolormesh(seen.state, cmap=named, vmin=-0.5, vmax=3.5, edgecolors=_PAPER[dark], lw=0.3, rasterized=True)
    columns, rows = tick_rows(len(seen.steps), 12), tick_rows(len(seen.ranks), 24)
    axes.set_xticks([column + 0.5 for column in columns], [str(seen.steps[column]) for column in columns])
    axes.set_yticks([row + 0.5 for row in rows], [f"rank {seen.ranks[row]}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="optimizer step")
    there = [(colour, word) for code, word, colour in COVERAGE if (seen.state == code).any()]
    _key(axes, there)
    return figure


def draw_cost(spent: Cost, *, dark: bool = False) -> Figure:
    """Draw what observing took of each step."""
    figure, (top, bottom) = _figure(5.0, dark, rows=2, sharex=True)
    top.plot(spent.steps, spent.share, color=SERIES[0], marker=".", lw=1.3)
    named = ((spent.self_s, "on the training thread"), (spent.transfer_s, "of it: transfer to the host"),
             (spent.merge_s, "merge, in the background"))  # fmt: skip
    for i, (seconds, name) in enumerate(named, 1):
        bottom.plot(spent.steps, 1e3 * seconds, color=SERIES[i], marker=".", lw=1.3, label=name)
    top.set(ylabel="share of the step (%)", ylim=(0, None))
    bottom.set(ylabel="time (ms)", xlabel="optimizer step", ylim=(0, None))
    bottom.legend(frameon=False, fontsize=8, labelcolor=_INK[dark], loc="upper right")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
    return figure


def _figure(
    height: float,
    dark: bool,
    rows: int = 1,
    columns: int = 1,
    *,
    sharex: bool = False,
    sharey: bool = False,
    **grid: Any,
) -> tuple[Figure, list[Axes]]:
    figure = required("matplotlib.figure").Figure(
        figsize=(_WIDTH, height), dpi=100, layout="constrained", facecolor=_PAPER[dark]
    )
    made = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False, gridspec_kw=grid or None)
    panels: list[Axes] = list(made.ravel())
    for axes in panels:
        _ink(axes, _INK[dark])
    return figure, panels


def _ink(axes: Axes, ink: str) -> None:
    axes.set_facecolor("none")
    axes.tick_params(colors=ink, which="both")
    for spine in axes.spines.values():
        spine.set_color(ink)
        spine.set_alpha(0.4)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(ink)


def _positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(values > 0, values, np.nan)


def _log(axes: Axes, values: NDArray[np.float64]) -> None:
    if (values > 0).any():
        axes.set_yscale("log")


def _add_strip(axes: Axes, x: NDArray[Any], codes: NDArray[np.uint8]) -> None:
    """Put symbols at the foot of the chart for what its axis cannot show."""
    for mark in MARKS:
        at = x[codes == mark.code]
        place = axes.get_xaxis_transform()
        axes.scatter(at, np.full(len(at), 0.03), c=mark.colour, marker=mark.matplotlib, transform=place, clip_on=False)


def _add_key(axes: Axes, codes: NDArray[np.uint8]) -> None:
    _key(axes, [(mark.colour, mark.word) for mark in MARKS if (codes == mark.code).any()])


def _key(axes: Axes, named: Sequence[tuple[str, str]]) -> None:
    patch = required("matplotlib.patches").Patch
    if named:
        handles = [patch(color=colour, label=word) for colour, word in named]
        ink = axes.xaxis.label.get_color()
        style = {"ncols": 3, "frameon": False, "fontsize": 8, "labelcolor": ink}
        axes.figure.legend(handles=handles, loc="outside lower right", **style)
