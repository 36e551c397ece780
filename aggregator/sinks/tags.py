"""The names under which trackers show the series of a site: ``kind/site/field``, the same in every run.

A tracker takes some characters and not others. A name that it takes stays as it is. In any other, each foreign
character becomes ``_``, a name that is too long is cut, and the first 8 hexadecimal digits of the site's id are put
behind it. The id follows from kind and name alone, so a changed name is stable as well, and no two are alike by
accident. Should two sites still meet in one name (kind ``a/b`` with site ``c``, kind ``a`` with site ``b/c``), the run
is refused at attach; of sites that show up later, the second one is left out of this tracker, and its report says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from telemetry.errors import SinkTagError
from telemetry.sites import SiteSpec

__all__ = ["ANY_PRINTABLE", "WORDS_AND_PUNCTUATION", "Alphabet", "TagBook", "step_tag"]

_ID_DIGITS: Final = 8
# Behind the name of a site comes a slash and the name of a field, of which "histogram.coarse" would be a long one.
_LONGEST_FIELD: Final = 24
_MAX_NAMED: Final = 5


@dataclass(frozen=True)
class Alphabet:
    """What a tracker takes as a name.

    Attributes:
        foreign: matches one character that it does not take.
        max_length: most characters of a whole tag, None for no limit.
        is_path: whether the tracker treats a tag as a path, so that ``.``, ``..`` and empty segments are foreign.
    """

    foreign: re.Pattern[str]
    max_length: int | None = None
    is_path: bool = False

    def takes(self, name: str) -> bool:
        """Tell whether tags that begin with ``name`` and a slash can stay as they are."""
        return not self.foreign.search(name) and self._is_short(name) and not self._has_odd_segment(name)

    def changed(self, name: str, site_id: int) -> str:
        """Return a name that the tracker takes."""
        clean = self.foreign.sub("_", name)
        if self.is_path:
            clean = "/".join("_" if segment in _ODD_SEGMENTS else segment for segment in clean.split("/"))
        if self.max_length is not None:
            clean = clean[: self.max_length - _LONGEST_FIELD - _ID_DIGITS - 2]
        return f"{clean}-{site_id:016x}"[: len(clean) + 1 + _ID_DIGITS]

    def _is_short(self, name: str) -> bool:
        return self.max_length is None or len(name) <= self.max_length - _LONGEST_FIELD - 1

    def _has_odd_segment(self, name: str) -> bool:
        return self.is_path and not _ODD_SEGMENTS.isdisjoint(name.split("/"))


_ODD_SEGMENTS: Final = frozenset({"", ".", ".."})
ANY_PRINTABLE: Final = Alphabet(re.compile(r"[\x00-\x1f\x7f]"))
WORDS_AND_PUNCTUATION: Final = Alphabet(re.compile(r"[^A-Za-z0-9_\-. :/]"), max_length=250, is_path=True)


class TagBook:
    """The names of all sites in one tracker. Used by one sink, first at attach and then on the sink's thread."""

    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._name_of: dict[int, str | None] = {}
        self._owner_of: dict[str, SiteSpec] = {}
        self._changed: list[tuple[str, str]] = []
        self._left_out: list[str] = []

    def admit(self, sites: Iterable[SiteSpec], sink: str) -> None:
        """Take in the sites that are known at attach.

        Raises:
            SinkTagError: two of them would have one name.
        """
        for site in sites:
            if site.site_id not in self._name_of and (owner := self._take_in(site)) is not None:
                raise SinkTagError(
                    f"sink {sink!r} would show {_in_words(site)} and {_in_words(owner)} as one",
                    site=site.name,
                    remedy="rename one of them, with site_names=… or where the call site names it",
                )

    def name(self, site: SiteSpec) -> str | None:
        """Return what the tags of a site begin with, None for a site that has to be left out."""
        if site.site_id not in self._name_of:
            self._take_in(site)
        return self._name_of[site.site_id]

    @property
    def disclosures(self) -> tuple[str, ...]:
        """What was changed or left out, in sentences."""
        told = []
        if self._changed:
            told.append(f"{len(self._changed)} names were changed: {_some(f'{a} → {b}' for a, b in self._changed)}")
        if self._left_out:
            told.append(f"{len(self._left_out)} sites were left out, another has the name: {_some(self._left_out)}")
        return tuple(told)

    def _take_in(self, site: SiteSpec) -> SiteSpec | None:
        """Name a site; return the other site that has this name already, if there is one."""
        wanted = f"{site.kind}/{site.name}"
        name = wanted if self._alphabet.takes(wanted) else self._alphabet.changed(wanted, site.site_id)
        owner = self._owner_of.setdefault(name, site)
        if owner is not site:
            self._name_of[site.site_id] = None
            self._left_out.append(_in_words(site))
            return owner
        self._name_of[site.site_id] = name
        if name != wanted:
            self._changed.append((wanted, name))
        return None


def step_tag(field: str) -> str:
    """Return the tag of a number that belongs to the step and to no site."""
    return f"rankfold/{field}"


def _in_words(site: SiteSpec) -> str:
    return f"{site.kind} {site.name!r}"


def _some(texts: Iterable[str]) -> str:
    listed = list(texts)
    return ", ".join(listed[:_MAX_NAMED]) + (", …" if len(listed) > _MAX_NAMED else "")
