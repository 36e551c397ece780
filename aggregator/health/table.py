"""What the definitions of a step's rows decide for the checks, worked out once for all steps with the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.health.layers import chains
from aggregator.health.update_ratio import update_pairs
from telemetry.sites import SiteSpec

__all__ = ["SiteTable"]

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SiteTable:
    """Columns over the rows of a step, and rows that belong together.

    Attributes:
        order: int64 ``[rows]``, place in the order in which the model defines and runs its sites.
        is_activation: bool ``[rows]``.
        chain_rows, chain_ids: rows of gradients, layer after layer towards the output, and which chain each is in.
        updates, weights: rows of updates, and of the parameters that they change.
    """

    order: Rows
    is_activation: NDArray[np.bool_]
    chain_rows: Rows
    chain_ids: Rows
    updates: Rows
    weights: Rows

    @staticmethod
    def of(sites: Sequence[SiteSpec], order: Mapping[int, int]) -> SiteTable:
        """Build the table; ``order`` is site id → place."""
        gradients = [row for row, site in enumerate(sites) if _has_judged_gradient(site)]
        chain_rows, chain_ids = chains(gradients, sites)
        updates, weights = update_pairs(sites)
        # Vectors are left out: a bias begins at zero, so that at first each step changes it by its own size.
        is_matrix = np.array([len(sites[row].shape) >= 2 for row in updates], dtype=bool)
        return SiteTable(
            order=np.array([order[site.site_id] for site in sites], dtype=np.int64),
            is_activation=np.array([site.kind == "activation" for site in sites], dtype=bool),
            chain_rows=chain_rows,
            chain_ids=chain_ids,
            updates=updates[is_matrix],
            weights=weights[is_matrix],
        )

    def neighbours(self, seen: NDArray[np.bool_]) -> tuple[Rows, Rows]:
        """Return rows of gradients and, aligned, those of their next neighbours nearer to the loss.

        Args:
            seen: bool ``[rows]``; a row that is not seen is stepped over.
        """
        kept = seen[self.chain_rows]
        rows, ids = self.chain_rows[kept], self.chain_ids[kept]
        together = ids[1:] == ids[:-1]
        return rows[:-1][together], rows[1:][together]


def _has_judged_gradient(site: SiteSpec) -> bool:
    # Of vectors, some have gradients that are rounding noise: the bias of attention keys, for one.
    return site.kind == "activation_grad" or (site.kind == "gradient" and len(site.shape) >= 2)
