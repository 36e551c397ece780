"""A layout for TensorBoard's custom-scalars dashboard: a category for each layer, a chart for each kind and field.

The scalar dashboard groups by the first segment of a tag, which is the kind. Whoever looks for a layer finds it here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from telemetry.sites import SiteSpec

__all__ = ["LAYOUT_FIELDS", "Layout", "LayoutBook"]

Layout = dict[str, dict[str, list[str | list[str]]]]
"""Category → chart → ["Multiline", regular expressions of tags], as ``SummaryWriter.add_custom_scalars`` takes it."""

LAYOUT_FIELDS: Final = ("rms", "absmax", "nonfinite")
"""A dashboard of everything would be no dashboard."""


class LayoutBook:
    """The layers of a model as they become known, in the order of the model."""

    def __init__(self, fields: Sequence[str]) -> None:
        """Take the fields that are written; those of ``LAYOUT_FIELDS`` among them have charts."""
        self._fields = [field for field in LAYOUT_FIELDS if field in fields]
        self._kinds_of: dict[str, dict[str, None]] = {}

    def take_in(self, sites: Iterable[SiteSpec]) -> bool:
        """Add sites; tell whether the layout has grown."""
        before = self._num_charts()
        for site in sites:
            self._kinds_of.setdefault(_layer(site.name), {})[site.kind] = None
        return self._num_charts() > before

    def layout(self) -> Layout:
        """Return the layout of all sites so far; sites of a known layer and kind that come later fall into it."""
        return {
            layer: {
                f"{kind} {field}": ["Multiline", [_pattern(kind, layer, field)]]
                for kind in kinds
                for field in self._fields
            }
            for layer, kinds in self._kinds_of.items()
        }

    def _num_charts(self) -> int:
        return sum(map(len, self._kinds_of.values())) * len(self._fields)


def _layer(name: str) -> str:
    """Return the name up to the first segment that is a number, or its first segment where none is."""
    segments = re.split(r"[.:/]", name)
    for i, segment in enumerate(segments):
        if segment.isdecimal():
            return name[: len(".".join(segments[: i + 1]))]
    return segments[0]


def _pattern(kind: str, layer: str, field: str) -> str:
    # TensorBoard matches from the beginning of the tag; layers.1 is not to take in layers.10.
    return rf"{re.escape(kind)}/{re.escape(layer)}(?!\w).*/{field}$"
