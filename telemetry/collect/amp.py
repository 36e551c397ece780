"""What a loss scaler did to the gradients of a step: read from the scaler, at the moment at which it is true.

``scaler.step(optimizer)`` unscales the gradients before the optimizer's hook sees them, unless the optimizer is a fused
one that unscales by itself, or the loop steps the optimizer without the scaler. What is still scaled is divided by the
scale of its backward, which for a power of two is exact. The scale is read when the step begins: at its end the scaler
may have grown it already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

__all__ = ["DERIVED", "NO_SCALER", "UNKNOWN", "UNSCALED", "GradientScale", "ScalerView"]

NO_SCALER: Final = "no_scaler"
"""No scaler was given, or it is disabled: the gradients are what backward left."""
UNSCALED: Final = "observed"
"""The scaler had unscaled the gradients when they were read."""
DERIVED: Final = "derived"
"""The gradients were read scaled and divided by the scale, a power of two, so that no bit was lost."""
UNKNOWN: Final = "unknown"
"""The scaler could not be read, or its scale is no power of two: the gradients are as measured."""


@dataclass(frozen=True)
class GradientScale:
    """How the gradients of one optimizer relate to what is recorded.

    Attributes:
        state: one of the four words above.
        divisor: what a gradient is to be divided by before it is reduced; 1.0 for as it is.
    """

    state: str
    divisor: float = 1.0


class ScalerView:
    """Reads one ``GradScaler`` over one due step; never calls anything that changes it, and never raises."""

    def __init__(self, scaler: Any | None) -> None:
        """Read the scale of the coming backward; on an accelerator the host waits for it once."""
        self._scaler = scaler if scaler is not None and _is_enabled(scaler) else None
        self.scale = None if self._scaler is None else _scale_of(self._scaler)
        self._found_inf: list[Tensor] = []

    def at_boundary(self, optimizer: Any) -> GradientScale:
        """Tell how the gradients that ``optimizer`` is about to use are scaled; called before its step."""
        if self._scaler is None:
            return GradientScale(NO_SCALER)
        if isinstance(found := getattr(optimizer, "found_inf", None), Tensor):
            self._found_inf.append(found.detach().clone())
        if getattr(optimizer, "grad_scale", None) is None and self._stage(optimizer) in ("UNSCALED", "STEPPED"):
            return GradientScale(UNSCALED)
        if self.scale is None or not _is_power_of_two(self.scale):
            return GradientScale(UNKNOWN)
        return GradientScale(DERIVED, self.scale)

    def skipped(self, optimizers: tuple[Any, ...], num_steps: int) -> bool:
        """Tell whether the scaler kept an optimizer from stepping; called at the end of the step.

        A fact, not a guess: the scaler's own record of non-finite gradients says so, or, once ``update`` has cleared
        that, the scale that it backed off from because of them.
        """
        if self._scaler is None:
            return False
        if any(float(found) > 0 for found in self._found_inf):
            return True
        if num_steps >= len(optimizers):
            return False
        after = _scale_of(self._scaler)
        backed_off = after is not None and self.scale is not None and after < self.scale
        return backed_off or any(self._recorded_inf(optimizer) for optimizer in optimizers)

    def _stage(self, optimizer: Any) -> str:
        return str(getattr(self._state(optimizer).get("stage"), "name", ""))

    def _recorded_inf(self, optimizer: Any) -> bool:
        found = self._state(optimizer).get("found_inf_per_device", {})
        return any(float(value) > 0 for value in found.values())

    def _state(self, optimizer: Any) -> dict[str, Any]:
        # get, because the scaler's dictionary makes an entry for every key that it is asked for with brackets.
        states = getattr(self._scaler, "_per_optimizer_states", {})
        return dict(states.get(id(optimizer), {}))


def _is_enabled(scaler: Any) -> bool:
    is_enabled = getattr(scaler, "is_enabled", None)
    return bool(is_enabled()) if callable(is_enabled) else True


def _scale_of(scaler: Any) -> float | None:
    try:
        return float(scaler.get_scale())
    except Exception:  # somebody's own scaler; what it cannot tell is recorded as unknown
        return None


def _is_power_of_two(value: float) -> bool:
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5
