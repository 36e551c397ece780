"""Why an observation has numbers, or why it has none: the closed vocabulary."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Presence"]


class Presence(IntEnum):
    """State of one scheduled observation.

    Over ranks the smallest value wins: one rank that observed makes the merged row observed, and among ranks that did
    not, the state that most needs attention is told. ``BUDGET_DROPPED`` alone wins against all others: numbers that
    lack a rank's part by choice are not shown as if they were whole.
    """

    OBSERVED = 0
    """The row has numbers, perhaps those of no elements at all."""
    CAPTURE_FAILED = 1
    """Reading the tensor raised; the reason holds the error."""
    UNSUPPORTED = 2
    """This kind of tensor, module or mode cannot be observed; the reason says which."""
    BUDGET_DROPPED = 3
    """Left out to keep a stated budget."""
    SITE_ABSENT = 4
    """Scheduled, but no tensor came: the module did not run, or the gradient is None."""
    NOT_SCHEDULED = 5
    """The step was not due for this site. Never stored as a row."""

    @property
    def label(self) -> str:
        """The word that records and reports use."""
        return self.name.lower()
