"""Charts of a run as plotly figures, for notebooks and for the report.

Each name without ``draw_`` reads a history and draws; each ``draw_`` draws what was read.
:mod:`aggregator.report.static_plots` has the same names for matplotlib.

Example:
    >>> from aggregator.report import plots
    >>> plots.heatmap(history, kind="gradient", field="absmax").show()      # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.health.update_ratio import UPDATE_TO_WEIGHT
from aggregator.history import History
from aggregator.report.account import Cost, RankCoverage, read_cost, read_coverage
from aggregator.report.choice import (
    MAX_COLUMNS,
    chosen_columns,
    profile_kinds,
    ratio_quantiles,
    tick_rows,
)
from aggregator.report.colours import COVERAGE, DIVERGING, MARKS, SEQUENTIAL, SERIES, cell_codes
from aggregator.report.grid import Grid, read_grid, time_spans
from aggregator.report.optional import required
from aggregator.report.order import shortened
from aggregator.report.ridges import BANDS, RIDGE_OVERLAP, Ridges, read_one_ridges, shown_share
from aggregator.report.scale import Scale, field_label, scale_of, shown_number

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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

_ROW_PX: Final = 11
_HOVER_STEP: Final = "%{text}<br>"
_AXIS: Final = {"showgrid": True, "zeroline": False, "ticks": "outside", "ticklen": 4, "automargin": True}


def heatmap(history: History, *, kind: str = "activation", field: str = "rms") -> Figure:
    """Draw one field of all sites of a kind, from input to output, over time.

    Raises:
        ReportUnavailableError: plotly is not installed.
        KindUnknownError, FieldUnknownError: with near names.
    """
    return draw_heatmap(read_grid(history, kind, [field], every=time_spans(history, MAX_COLUMNS).every), field)


def depth_profile(history: History, *, field: str = "rms") -> Figure:
    """Draw a field of activations and of their gradients from input to output, at five steps."""
    every = time_spans(history, MAX_COLUMNS).every
    return draw_depth_profile(
        [read_grid(history, kind, [field], every=every) for kind in profile_kinds(history)], field
    )


def histogram_ridgeline(history: History, site: str, kind: str = "activation") -> Figure:
    """Draw the histograms of one site over time, and the shares of zero, underflow, overflow, NaN and ±inf.

    Raises:
        SiteUnknownError, KindUnknownError: with near names.
        HistogramAbsentError: the site has none.
    """
    return draw_histogram_ridgeline(read_one_ridges(history, site, kind))


def update_to_weight(history: History, site: str | None = None) -> Figure:
    """Draw by how much of its size each step changes a weight, over all matrices, and of one site."""
    every = time_spans(history, MAX_COLUMNS).every
    return draw_update_to_weight(read_grid(history, "update", [UPDATE_TO_WEIGHT], every=every), site)


def coverage(history: History) -> Figure:
    """Draw which ranks are in which steps."""
    return draw_coverage(read_coverage(history))


def cost(history: History) -> Figure:
    """Draw what observing took of each step."""
    return draw_cost(read_cost(history))


def draw_heatmap(grid: Grid, field: str) -> Figure:
    """Draw one field of a grid; see :func:`heatmap`."""
    values, scale = grid.fields[field], scale_of(field, grid.fields[field])
    spans = [grid.span(column) for column in range(len(grid.step_lo))]
    shape = {"x": grid.edges, "y": list(grid.names), "text": [spans] * len(grid.names), "hoverongaps": False}
    codes = cell_codes(grid, field)
    words = {mark.code: mark.word for mark in MARKS}
    figure = _figure(height=max(260, 130 + _ROW_PX * len(grid.names)))
    figure.add_heatmap(
        **shape,
        z=scale.transform(values),
        customdata=values,
        hovertemplate=f"<b>%{{y}}</b><br>{_HOVER_STEP}{field} %{{customdata:.5g}}<extra></extra>",
        **_colours(scale, field),
    )
    figure.add_heatmap(
        **shape,
        z=np.where(np.isin(codes, list(words)), codes, np.nan),
        customdata=[
            [_state_words(words, code, value) for code, value in zip(*row, strict=True)]
            for row in zip(codes.tolist(), values.tolist(), strict=True)
        ],
        hovertemplate=f"<b>%{{y}}</b><br>{_HOVER_STEP}%{{customdata}}<extra></extra>",
        **_mark_colours(),
    )
    rows = tick_rows(len(grid.names), 60)
    figure.update_xaxes(**_AXIS, title="optimizer step")
    labels = {"tickvals": rows, "ticktext": [shortened(grid.names[row]) for row in rows]}
    figure.update_yaxes(
        **_AXIS, title="input → output", type="category", autorange="reversed", tickmode="array", **labels
    )
    figure.update_yaxes(showgrid=False, tickfont={"size": 10})
    return figure


def draw_depth_profile(grids: Sequence[Grid], field: str) -> Figure:
    """Draw one field of each grid over depth, at five columns of each; see :func:`depth_profile`."""
    share = 1 / max(1, len(grids))
    figure = _subplots(rows=2 * max(1, len(grids)))
    for number, grid in enumerate(grids):
        # Lines, the strip of marks, and room for names below.
        foot = 1 - (number + 1) * share
        figure.update_yaxes(domain=[foot + 0.39 * share, foot + share], row=2 * number + 1, col=1)
        figure.update_yaxes(domain=[foot + 0.32 * share, foot + 0.37 * share], row=2 * number + 2, col=1)
        top, places = 2 * number + 1, list(range(len(grid.names)))
        columns = chosen_columns(len(grid.step_lo))
        for i, column in enumerate(columns):
            figure.add_scatter(
                x=places, y=_positive(grid.fields[field][:, column]), text=list(grid.names), name=grid.span(column),
                legendgroup=str(i), showlegend=number == 0, mode="lines+markers", marker={"size": 4},
                line={"color": SERIES[i], "width": 1.6}, row=top, col=1,
                hovertemplate=f"<b>%{{text}}</b><br>{grid.span(column)}<br>{field} %{{y:.4g}}<extra></extra>",
            )  # fmt: skip
        _add_marks(figure, top + 1, places, list(grid.names), cell_codes(grid, field)[:, columns].max(1, initial=0))
        rows = tick_rows(len(grid.names), 24)
        figure.update_yaxes(**_AXIS, title=f"{grid.kind}<br>{field}", type="log", exponentformat="e", row=top, col=1)
        figure.update_xaxes(**_AXIS, range=[-0.5, len(places) - 0.5], row=top, col=1)
        figure.update_xaxes(showticklabels=False, row=top, col=1)
        labels = {"tickvals": rows, "ticktext": [shortened(grid.names[row], 22) for row in rows]}
        figure.update_xaxes(**_AXIS, range=[-0.5, len(places) - 0.5], tickangle=-60, row=top + 1, col=1, **labels)
        figure.update_xaxes(tickfont={"size": 10}, showgrid=False, row=top + 1, col=1)
    figure.update_layout(height=80 + 430 * max(1, len(grids)))
    return figure


def draw_histogram_ridgeline(ridges: Ridges) -> Figure:
    """Draw the histograms of one site; see :func:`histogram_ridgeline`."""
    figure = _subplots(rows=1, cols=2, column_widths=[0.72, 0.28], horizontal_spacing=0.03, shared_yaxes=True)
    for i in reversed(range(len(ridges.steps))):
        figure.add_scatter(
            x=[ridges.x[0], *ridges.x, ridges.x[-1]], y=[i, *(i + RIDGE_OVERLAP * ridges.heights[i]), i], mode="lines",
            line={"color": SERIES[0], "width": 1, "shape": "hvh"}, fill="toself", fillcolor="rgba(59,125,216,0.35)",
            name=f"step {ridges.steps[i]}", hoverinfo="name", hoveron="fills", row=1, col=1,
        )  # fmt: skip
    percent = 100 * ridges.shares
    figure.add_heatmap(
        x=list(BANDS), y=list(range(len(ridges.steps))), z=percent, zmin=0, zmax=100, showscale=False,
        colorscale=[[0, "rgba(240,72,155,0)"], [1e-9, "rgba(240,72,155,0.18)"], [1, "rgba(240,72,155,0.9)"]],
        text=[[shown_share(value) for value in row] for row in ridges.shares.tolist()], texttemplate="%{text}",
        hovertemplate="step %{customdata}<br>%{x}: %{text} of all elements<extra></extra>",
        customdata=[[int(step)] * len(BANDS) for step in ridges.steps], row=1, col=2,
    )  # fmt: skip
    rows = {"tickvals": list(range(len(ridges.steps))), "ticktext": [str(step) for step in ridges.steps]}
    figure.update_yaxes(**_AXIS, range=[-0.6, len(ridges.steps) + RIDGE_OVERLAP - 0.6], **rows)
    figure.update_yaxes(title="optimizer step", row=1, col=1)
    places, words = zip(*ridges.ticks, strict=True)
    figure.update_xaxes(
        **_AXIS, title="value of an element (log2, both signs)", tickvals=places, ticktext=words, row=1, col=1
    )
    figure.update_xaxes(**_AXIS, title="share of all elements", row=1, col=2)
    figure.update_layout(height=140 + 42 * max(4, len(ridges.steps)), showlegend=False)
    return figure


def draw_update_to_weight(grid: Grid, site: str | None = None) -> Figure:
    """Draw the ratios of a grid of updates; see :func:`update_to_weight`."""
    figure = _subplots(rows=2, row_heights=[0.93, 0.07], vertical_spacing=0.02)
    spans = [grid.span(column) for column in range(len(grid.step_lo))]
    for i, (name, values, fill) in enumerate(ratio_quantiles(grid)):
        figure.add_scatter(
            x=grid.centers, y=_positive(values), text=spans, name=name, mode="lines+markers", marker={"size": 3},
            line={"color": SERIES[0], "width": 2.2 if i == 2 else 1, "dash": "dot" if i in (0, 4) else "solid"},
            fill="tonexty" if fill else None, fillcolor="rgba(59,125,216,0.18)", row=1, col=1,
            hovertemplate=f"{name} of all matrices<br>{_HOVER_STEP}%{{y:.3g}}<extra></extra>",
        )  # fmt: skip
    row = grid.names.index(site) if site is not None else 0
    figure.add_scatter(
        x=grid.centers, y=_positive(grid.fields[UPDATE_TO_WEIGHT][row]), text=spans, name=grid.names[row],
        mode="lines+markers", marker={"size": 4}, line={"color": SERIES[1], "width": 1.8}, row=1, col=1,
        hovertemplate=f"<b>{grid.names[row]}</b><br>{_HOVER_STEP}%{{y:.3g}}<extra></extra>",
    )  # fmt: skip
    _add_marks(figure, 2, grid.centers.tolist(), spans, cell_codes(grid, UPDATE_TO_WEIGHT)[row])
    figure.update_yaxes(**_AXIS, title=field_label(UPDATE_TO_WEIGHT), type="log", exponentformat="e", row=1, col=1)
    figure.update_xaxes(**_AXIS, matches="x")
    figure.update_xaxes(showticklabels=False, row=1, col=1)
    figure.update_xaxes(title="optimizer step", showgrid=False, row=2, col=1)
    figure.update_layout(height=430)
    return figure


def draw_coverage(seen: RankCoverage) -> Figure:
    """Draw ranks over steps; see :func:`coverage`."""
    figure = _figure(height=max(200, 130 + 14 * min(40, len(seen.ranks))))
    words = {code: word for code, word, _ in COVERAGE}
    figure.add_heatmap(
        x=[str(step) for step in seen.steps], y=[f"rank {rank}" for rank in seen.ranks], z=seen.state, zmin=-0.5,
        zmax=3.5, colorscale=_stepped([colour for *_, colour in COVERAGE]), showscale=False, xgap=1, ygap=1,
        customdata=[[words[code] for code in row] for row in seen.state.tolist()],
        hovertemplate="%{y}, step %{x}<br>%{customdata}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(**_AXIS, title="optimizer step", type="category", nticks=12)
    figure.update_yaxes(**_AXIS, type="category", autorange="reversed")
    return figure


def draw_cost(spent: Cost) -> Figure:
    """Draw what observing took; see :func:`cost`."""
    figure = _subplots(rows=2, vertical_spacing=0.09)
    series = [
        ("share of the step", spent.share, "%", 1),
        ("on the training thread", 1e3 * spent.self_s, "ms", 2),
        ("of it: transfer to the host", 1e3 * spent.transfer_s, "ms", 2),
        ("merge, in the background", 1e3 * spent.merge_s, "ms", 2),
    ]
    for i, (name, values, unit, row) in enumerate(series):
        figure.add_scatter(
            x=spent.steps, y=values, name=name, mode="lines+markers", marker={"size": 4},
            line={"color": SERIES[i], "width": 1.6}, row=row, col=1,
            hovertemplate=f"{name}<br>step %{{x}}: %{{y:.3g}} {unit}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(**_AXIS, matches="x")
    figure.update_xaxes(title="optimizer step", row=2, col=1)
    figure.update_yaxes(**_AXIS, rangemode="tozero")
    figure.update_yaxes(title="share (%)", row=1, col=1)
    figure.update_yaxes(title="time (ms)", row=2, col=1)
    figure.update_layout(height=460)
    return figure


def _figure(height: int) -> Figure:
    return required("plotly.graph_objects").Figure(layout=_layout(height))


def _subplots(**places: Any) -> Figure:
    figure = required("plotly.subplots").make_subplots(**places)
    figure.update_layout(**_layout(400))
    return figure


def _layout(height: int) -> dict[str, Any]:
    legend = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left"}
    margin = {"l": 60, "r": 16, "t": 24, "b": 48}
    return {"template": "none", "height": height, "margin": margin, "legend": legend, "hovermode": "closest"}


def _colours(scale: Scale, field: str) -> dict[str, Any]:
    places, words = zip(*scale.ticks, strict=True)
    bar = {"title": {"text": field_label(field), "side": "right"}, "tickvals": places, "ticktext": words,
           "thickness": 14, "outlinewidth": 0}  # fmt: skip
    colours = DIVERGING if scale.is_signed else SEQUENTIAL
    even = [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]
    return {"colorscale": even, "zmin": scale.low, "zmax": scale.high, "colorbar": bar}


def _mark_colours() -> dict[str, Any]:
    colours = _stepped([mark.colour for mark in MARKS])
    return {"colorscale": colours, "zmin": MARKS[0].code - 0.5, "zmax": MARKS[-1].code + 0.5, "showscale": False}


def _stepped(colours: Sequence[str]) -> list[list[Any]]:
    num = len(colours)
    return [[(i + end) / num, colour] for i, colour in enumerate(colours) for end in (0, 1)]


def _add_marks(figure: Figure, row: int, x: Sequence[float], names: Sequence[str], codes: NDArray[np.uint8]) -> None:
    """Add a strip of symbols for what a logarithmic axis cannot show."""
    by_code = {mark.code: mark for mark in MARKS}
    kept = [(i, by_code[code]) for i, code in enumerate(codes.tolist()) if code in by_code]
    figure.add_scatter(
        x=[x[i] for i, _ in kept], y=[0] * len(kept), mode="markers", showlegend=False,
        marker={"symbol": [mark.symbol for _, mark in kept], "color": [mark.colour for _, mark in kept], "size": 8,
                "line": {"width": 2}},
        text=[f"<b>{names[i]}</b><br>{mark.word}" for i, mark in kept], hovertemplate="%{text}<extra></extra>",
        row=row, col=1,
    )  # fmt: skip
    bare = {"showticklabels": False, "showgrid": False, "zeroline": False, "ticks": ""}
    figure.update_yaxes(**bare, range=[-1, 1], fixedrange=True, row=row, col=1)


def _positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(values > 0, values, np.nan)


def _state_words(words: dict[int, str], code: int, value: float) -> str:
    if code not in words:
        return ""
    return words[code] if np.isnan(value) else f"{words[code]}<br>of the finite ones: {shown_number(value)}"
