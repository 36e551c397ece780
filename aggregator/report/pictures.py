"""The report's charts as PNG: for readers without scripts, and for files."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aggregator.report import static_plots
from aggregator.report.contents import Contents
from aggregator.report.data import start_kind, start_ridges
from aggregator.report.optional import required
from aggregator.report.scale import scale_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Picture", "embedded_png", "pictures_of", "png_bytes"]


@dataclass(frozen=True)
class Picture:
    """One chart.

    Attributes:
        alt: what it shows, in words.
        draw: makes the figure; takes ``dark``.
    """

    alt: str
    draw: Callable[[bool], Figure]


def pictures_of(contents: Contents) -> dict[str, Picture]:
    """Return the charts that a run has, in the order of the report."""
    field, made = contents.field, {}
    if contents.grids:
        grid = contents.grids[start_kind(contents)]
        made["heatmap"] = Picture(
            f"Heat map of {field} of every {grid.kind}, input to output, over the steps",
            lambda dark: static_plots.draw_heatmap(grid, field, dark=dark),
        )
    if contents.profile:
        grids = [contents.grids[kind] for kind in contents.profile]
        depth = "rms" if scale_of(field, grids[0].fields[field]).is_signed else field
        made["profile"] = Picture(
            f"{depth} from input to output at chosen steps, of {' and '.join(contents.profile)}",
            lambda dark: static_plots.draw_depth_profile(grids, depth, dark=dark),
        )
    if contents.ridges:
        ridges = start_ridges(contents)
        made["ridges"] = Picture(
            f"Histograms of {ridges.kind} {ridges.site} over the steps",
            lambda dark: static_plots.draw_histogram_ridgeline(ridges, dark=dark),
        )
    if contents.has_ratio:
        made["ratio"] = Picture(
            "Quantiles of the update-to-weight ratio over all matrices, over the steps",
            lambda dark: static_plots.draw_update_to_weight(contents.grids["update"], dark=dark),
        )
    if len(contents.cost.steps):
        if contents.coverage.ranks:
            made["coverage"] = Picture(
                "Which ranks are in which steps", lambda dark: static_plots.draw_coverage(contents.coverage, dark=dark)
            )
        made["cost"] = Picture(
            "Share and time of each step spent on observing",
            lambda dark: static_plots.draw_cost(contents.cost, dark=dark),
        )
    return made


def png_bytes(figure: Figure) -> bytes:
    """Return the figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor())
    return buffer.getvalue()


def embedded_png(figure: Figure) -> bytes:
    """Return the figure as PNG with 256 colours, about a third as large; the colour of each state is kept to 1/255."""
    pillow = required("PIL.Image")
    image = pillow.open(io.BytesIO(png_bytes(figure))).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(256, pillow.Quantize.FASTOCTREE, dither=pillow.Dither.NONE).save(buffer, format="png", optimize=True)
    return buffer.getvalue()
