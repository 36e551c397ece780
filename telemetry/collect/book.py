"""All sites that this rank has met: their definitions, who counts them, and where their rows are staged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from telemetry.block import Block, block_of
from telemetry.collect.placing import CallDims, PlacementRules
from telemetry.errors import RankfoldError
from telemetry.layout import ParallelLayout
from telemetry.placement import RankRelation
from telemetry.sites import SiteSpec

__all__ = ["LocalSite", "SiteBook"]


@dataclass(eq=False)
class LocalSite:
    """A site as one rank knows it.

    Attributes:
        spec: the definition that travels.
        site_id: its key in packets.
        relation: where its elements lie.
        contributes: whether this rank's elements count.
        replica_slot: number of the part of the site that this rank holds, where other ranks hold the same part and
            it is therefore checked; None where no other rank does.
        refusal: why the site cannot be observed at all, or "".
        slots: staging slot on each device that the site was seen on.
    """

    spec: SiteSpec
    site_id: int
    relation: RankRelation
    contributes: bool
    replica_slot: int | None
    refusal: str = ""
    slots: dict[torch.device, int] = field(default_factory=dict)


class SiteBook:
    """(kind, name) → site; also keeps which definitions have not been sent yet."""

    def __init__(self, rules: PlacementRules, layout: ParallelLayout, rank: int) -> None:
        self._rules = rules
        self._layout = layout
        self._rank = rank
        self._sites: dict[tuple[str, str], LocalSite] = {}
        self._unsent: list[SiteSpec] = []

    def find(self, kind: str, name: str) -> LocalSite | None:
        """Return a known site, or None."""
        return self._sites.get((kind, name))

    def of(self, kind: str, name: str) -> LocalSite:
        """Return a site that was defined at attach."""
        return self._sites[kind, name]

    def add(
        self,
        kind: str,
        name: str,
        tensor: Tensor | None,
        *,
        aliases: tuple[str, ...] = (),
        dims: CallDims | None = None,
    ) -> LocalSite:
        """Return the site of a tensor that a running step shows; the definition of the first sight stays.

        A tensor that cannot be placed makes a site that says so at each observation, because training goes on.
        """
        if (known := self.find(kind, name)) is not None:
            return known
        try:
            relation = self._rules.relation(kind, name, tensor, dims)
            refusal = _partial_refusal(relation)
        except RankfoldError as error:
            relation, refusal = self._layout.relation(kind), f"{error.code}: {error.message}"
        spec = SiteSpec(
            name=name,
            kind=kind,
            dtype="none" if tensor is None else _dtype_name(tensor),
            shape=() if tensor is None else tuple(tensor.shape),
            numel=None,
            placements=relation.describe(),
            aliases=aliases,
        )
        return self._enter(spec, relation, refusal)

    def define_weight(
        self, kind: str, name: str, parameter: Tensor, *, aliases: tuple[str, ...] = (), sample_size: int | None = None
    ) -> tuple[LocalSite, Block]:
        """Define a site of a parameter, gradient or update at attach, where it is placed as the parameter is.

        Args:
            sample_size: elements of the logical tensor that are followed, None for all.

        Raises:
            RankfoldError: the parameter cannot be placed.
        """
        relation = self._rules.relation(kind, name, parameter)
        block = block_of(parameter, relation, self._sizes(relation), self._coordinates(relation))
        spec = SiteSpec(
            name=name,
            kind=kind,
            dtype=_dtype_name(parameter),
            shape=tuple(parameter.shape),
            numel=block.numel,
            placements=relation.describe(),
            aliases=aliases,
            estimated=sample_size is not None and sample_size < block.numel,
        )
        return self._enter(spec, relation, _partial_refusal(relation)), block

    def take_unsent(self) -> tuple[SiteSpec, ...]:
        """Return the definitions added since the last call."""
        unsent, self._unsent = tuple(self._unsent), []
        return unsent

    def _enter(self, spec: SiteSpec, relation: RankRelation, refusal: str) -> LocalSite:
        coordinates, sizes = self._coordinates(relation), self._sizes(relation)
        site = LocalSite(
            spec=spec,
            site_id=spec.site_id,
            relation=relation,
            contributes=relation.contributes(coordinates),
            replica_slot=_slot_number(relation, coordinates, sizes),
            refusal=refusal,
        )
        self._sites[spec.kind, spec.name] = site
        self._unsent.append(spec)
        return site

    def _coordinates(self, relation: RankRelation) -> Mapping[str, int]:
        return self._layout.coordinates(self._rank, expert=relation.expert)

    def _sizes(self, relation: RankRelation) -> Mapping[str, int]:
        grid = self._layout.expert if relation.expert else self._layout.dense
        assert grid is not None, "a relation on the expert grid of a layout without one"
        return dict(grid.axes)


def _partial_refusal(relation: RankRelation) -> str:
    if not relation.partial_axes:
        return ""
    axes = ", ".join(relation.partial_axes)
    return (
        f"partial over {axes}: the local value is no sample of the tensor; "
        "watch(…, reduce_partial=True) reduces a copy of such a DTensor on due steps"
    )


def _slot_number(relation: RankRelation, coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> int | None:
    slot = relation.slot(coordinates)
    if slot is None or all(sizes[axis] == 1 for axis in relation.replica_axes):
        return None
    number = 0
    split = [axis for axis, _ in relation.placements if axis not in relation.replica_axes]
    for axis, coordinate in zip(split, slot, strict=True):
        number = number * sizes[axis] + coordinate
    return number


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
