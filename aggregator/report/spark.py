"""A series as a small line that stands in the text."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["sparkline"]

_WIDTH, _HEIGHT, _PAD = 220, 36, 4


def sparkline(points: Sequence[tuple[int, float | None]], marked: Sequence[int], label: str) -> str:
    """Return an SVG element: the series on a logarithmic axis, gaps where it has no number, and steps that are marked.

    Args:
        points: (step, value), ascending; None, zero and less have no place on the line.
        marked: steps with a vertical line.
        label: what it shows, for whoever does not see it; plain text without markup.
    """
    drawn = [(step, math.log10(value)) for step, value in points if value is not None and 0 < value < math.inf]
    if len(drawn) < 2:
        return ""
    steps, heights = [step for step, _ in points], [height for _, height in drawn]
    width, low, high = max(1, steps[-1] - steps[0]), min(heights), max(max(heights), min(heights) + 1e-9)

    def x(step: int) -> float:
        return round(_PAD + (_WIDTH - 2 * _PAD) * (step - steps[0]) / width, 1)

    def y(height: float) -> float:
        return round(_HEIGHT - _PAD - (_HEIGHT - 2 * _PAD) * (height - low) / (high - low), 1)

    place, path, pen_down = dict(drawn), [], False
    for step in steps:
        if step in place:
            path.append(f"{'L' if pen_down else 'M'}{x(step)} {y(place[step])}")
        pen_down = step in place
    lines = "".join(
        f'<path class="at" d="M{x(step)} 0V{_HEIGHT}"/>' for step in marked if steps[0] <= step <= steps[-1]
    )
    return (
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f'{lines}<path class="line" d="{"".join(path)}"/></svg>'
    )
