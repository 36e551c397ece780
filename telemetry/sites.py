"""What is observed: the identity of a site, and the kinds there are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final

__all__ = ["KIND_OF_SIGNAL", "SIGNALS", "SiteSpec"]

KIND_OF_SIGNAL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "activations": "activation",
        "activation_grads": "activation_grad",
        "parameters": "parameter",
        "gradients": "gradient",
        "updates": "update",
    }
)
SIGNALS: Final = tuple(KIND_OF_SIGNAL)


@dataclass(frozen=True)
class SiteSpec:
    """One site: a model-wide name and a source kind. The pair is the identity; all else describes it.

    Attributes:
        name: canonical name, the same on every rank that has the site.
        kind: source kind, one of the five of ``KIND_OF_SIGNAL`` or any other word of a call site.
        dtype: of the tensor, as torch prints it without the prefix.
        shape: of the local tensor when it was first seen.
        numel: logical number of elements of one observation where it is known (parameters), else None.
        placements: (axis, placement) for every axis of the layout.
        aliases: other names of the same tensor or module.
        estimated: the summary is over a fixed sample of the elements, not over all.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    numel: int | None
    placements: tuple[tuple[str, str], ...]
    aliases: tuple[str, ...] = ()
    estimated: bool = False

    @property
    def site_id(self) -> int:
        """64-bit key of (kind, name), equal on every rank without any agreement."""
        digest = hashlib.blake2b(f"{self.kind}\0{self.name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def conflict_with(self, other: SiteSpec) -> str:
        """Return what keeps the two from being one site, or ""; local shapes and aliases may differ by rank."""
        for what in ("name", "kind", "dtype", "placements", "estimated", "numel"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                return f"{what} {mine!r} against {theirs!r}"
        return ""

    def with_aliases(self, aliases: tuple[str, ...]) -> SiteSpec:
        """Return the same site with further names."""
        return replace(self, aliases=tuple(sorted({*self.aliases, *aliases})))

    def to_wire(self) -> dict[str, Any]:
        """Return the site as a JSON-serialisable dictionary."""
        return asdict(self)

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> SiteSpec:
        """Rebuild a site from :meth:`to_wire`, lists back into tuples."""
        return SiteSpec(
            name=wire["name"],
            kind=wire["kind"],
            dtype=wire["dtype"],
            shape=tuple(wire["shape"]),
            numel=wire["numel"],
            placements=tuple((axis, placement) for axis, placement in wire["placements"]),
            aliases=tuple(wire["aliases"]),
            estimated=wire["estimated"],
        )
