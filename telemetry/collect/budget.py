"""A maximum for what observing may cost in a logged step, kept by what earlier steps were measured to cost.

A site is either observed whole in a step or left out of it whole, and that is decided before the step begins. Which
sites come first moves with the number of the step, in the same way on every rank: ranks that hold the same sites leave
out nested parts of one order, so what the merge loses is what the slowest of them leaves out, and over the steps every
site gets its turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from telemetry.collect.book import LocalSite
from telemetry.errors import ConfigurationError

__all__ = ["CostBudget", "checked_budget"]

# Weight of the newest measurement.
_NEWEST: Final = 0.3
# What a site that was left out is believed to cost shrinks at each step, so that one slow moment does not ban it.
_FADING: Final = 0.9
# A histogram that was never measured at a site; the kernel's own factor lies between 1.5 and 2.5.
_HISTOGRAM_FACTOR: Final = 2.5
# Steps rotate by the golden section of the order: consecutive and regularly spaced steps both begin evenly spread.
_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0


def checked_budget(budget_ms: float | None) -> float | None:
    """Return the budget in milliseconds, None for none.

    Raises:
        ConfigurationError: it is no positive number.
    """
    if budget_ms is None:
        return None
    is_number = isinstance(budget_ms, int | float) and not isinstance(budget_ms, bool)
    if not is_number or not 0 < budget_ms < math.inf:
        raise ConfigurationError(
            f"budget_ms is {budget_ms!r}", remedy="give milliseconds a logged step, more than 0, or None for no budget"
        )
    return float(budget_ms)


class CostBudget:
    """Chooses what a logged step leaves out; one for a session, used by its training thread and its hooks.

    The first logged step measures, and leaves nothing out. Only time on the host is seen.
    """

    def __init__(self, budget_ms: float) -> None:
        """Begin without measurements; ``budget_ms`` as :func:`checked_budget` returns it."""
        self.budget_ms = budget_ms
        self._plain: dict[LocalSite, float] = {}
        self._counted: dict[LocalSite, float] = {}
        self._charged: dict[LocalSite, float] = {}
        self._fixed: float | None = None
        self._histogram = False
        self._left_out: frozenset[LocalSite] = frozenset()

    @property
    def reason(self) -> str:
        """What the rows of sites that were left out say."""
        return f"left out to keep budget_ms={self.budget_ms:g}"

    def choose(self, step: int, is_due: Callable[[LocalSite], bool], *, histogram: bool) -> frozenset[LocalSite]:
        """Begin a logged step.

        Args:
            step: its number.
            is_due: tells whether the step schedules a site.
            histogram: whether the step counts bins.

        Returns:
            The sites to leave out.
        """
        self._histogram = histogram
        self._charged.clear()
        due = [site for site in self._plain if is_due(site)]
        left_s = self.budget_ms / 1e3 - (self._fixed or 0.0)
        first = int(step * _GOLDEN % 1.0 * len(due))
        left_out = []
        for site in (*due[first:], *due[:first]):
            left_s -= self._expected(site)
            if left_s < 0.0:
                left_out.append(site)
        self._left_out = frozenset(left_out)
        return self._left_out

    def charge(self, site: LocalSite, seconds: float) -> None:
        """Count what a part of the observation of a site has cost in the running step."""
        self._charged[site] = self._charged.get(site, 0.0) + seconds

    def settle(self, total_s: float) -> None:
        """End the step, of which ``total_s`` seconds were ours in all."""
        estimates = self._counted if self._histogram else self._plain
        for site, seconds in self._charged.items():
            if self._histogram:
                self._plain.setdefault(site, seconds / _HISTOGRAM_FACTOR)
            estimates[site] = _moved(estimates.get(site), seconds)
        for site in self._left_out:
            estimates[site] = self._expected(site) * _FADING
        self._fixed = _moved(self._fixed, max(0.0, total_s - sum(self._charged.values())))

    def _expected(self, site: LocalSite) -> float:
        if not self._histogram:
            return self._plain[site]
        return self._counted.get(site, self._plain[site] * _HISTOGRAM_FACTOR)


def _moved(estimate: float | None, measured: float) -> float:
    return measured if estimate is None else estimate + _NEWEST * (measured - estimate)
