"""What a gate file declares about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["Gate", "Limit", "Needs", "NotRunError"]

_HOLDS: Final = {
    "at most": lambda value, bound: value <= bound,
    "at least": lambda value, bound: value >= bound,
    "equal to": lambda value, bound: value == bound,
}


class NotRunError(Exception):
    """Raised by a gate that finds it cannot be carried out here; the text is the reason in its verdict."""


@dataclass(frozen=True)
class Needs:
    """What a gate needs to prove its point; without it, it is rehearsed.

    Attributes:
        gpus_per_node: GPUs on every node; num_nodes: hosts.
        modules: Python modules that have to be importable, in a rehearsal as well: module → how to install it.
    """

    gpus_per_node: int = 0
    num_nodes: int = 1
    modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Limit:
    """A bound on one measured quantity.

    Attributes:
        name: of the quantity, as ``run`` returns it.
        bound: the limit itself, and which side is good.
        unit: of the quantity, "" for a count or a ratio.
        on_gpu_only: whether it says nothing in a rehearsal, and is measured there without being judged: costs and
            times of a busy laptop.
    """

    name: str
    comparison: Literal["at most", "at least", "equal to"]
    bound: float
    unit: str = ""
    on_gpu_only: bool = False

    def holds(self, value: float) -> bool:
        """Tell whether ``value`` is within the limit; NaN never is."""
        return bool(_HOLDS[self.comparison](value, self.bound))


@dataclass(frozen=True)
class Gate:
    """One gate, as its file declares it under the name ``GATE``.

    Attributes:
        name: of the gate and of its file, with hyphens for underscores.
        purpose: what a pass proves, one sentence.
        procedure: what is done, in a few sentences.
        needs: see :class:`Needs`.
        limits: all have to hold.
        deadline_s: after which it has failed.
        rehearsal: what a rehearsal proves and what it does not, one sentence.
        pending: why the gate cannot be run anywhere yet, "" if it can.
    """

    name: str
    purpose: str
    procedure: str
    needs: Needs
    limits: tuple[Limit, ...]
    rehearsal: str
    deadline_s: float = 300.0
    pending: str = ""
