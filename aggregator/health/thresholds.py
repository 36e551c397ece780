"""Where the built-in checks draw the line: every number that decides about a finding, in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from telemetry.errors import ConfigurationError

__all__ = ["Thresholds"]


@dataclass(frozen=True)
class Thresholds:
    """Limits of the built-in checks; they go into the run record.

    Attributes:
        gradient_ratio: rms of a gradient over that of its neighbour one layer nearer to the loss, above which the
            gradient explodes; below the reciprocal it vanishes.
        dead_zero_fraction: fraction of exact zeros in an activation above which its units count as dead.
        update_ratio_low, update_ratio_high: band of the rms of an update over the rms of its weight.
        confirm_observations: how often in a row dead units and update ratios have to be seen before they are told; a
            weight that begins at zero moves by its own size at first.
        recover_observations: how often in a row a site has to be well again before its trouble is over.
        repeat_steps: after so many steps a trouble that goes on is told again, with a count.
        max_named_sites: sites with evidence in one finding; further ones are counted.

    Raises:
        ConfigurationError: a limit cannot be one.

    Example:
        >>> Thresholds(dead_zero_fraction=0.99).repeat_steps
        1000
    """

    gradient_ratio: float = 100.0
    dead_zero_fraction: float = 0.95
    update_ratio_low: float = 1e-7
    update_ratio_high: float = 0.1
    confirm_observations: int = 2
    recover_observations: int = 3
    repeat_steps: int = 1000
    max_named_sites: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise _refused(field.name, value, "a whole number" if whole else "a number")
            if not math.isfinite(value) or value < (1 if whole else 0):
                raise _refused(field.name, value, "1 or more" if whole else "finite and not negative")
        if self.gradient_ratio <= 1.0:
            raise _refused("gradient_ratio", self.gradient_ratio, "more than 1")
        if self.update_ratio_low > self.update_ratio_high:
            raise _refused("update_ratio_low", self.update_ratio_low, "at most update_ratio_high")


def _refused(name: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"Thresholds.{name} is {value!r}", remedy=f"it has to be {wanted}")
