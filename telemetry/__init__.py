"""Rankfold in the training process: watch a model on every rank, get one merged record of all.

Example:
    >>> import telemetry  # doctest: +SKIP
    >>> with telemetry.watch(model, optimizer=opt, to="runs/exp1", every=50) as session:  # doctest: +SKIP
    ...     for step, batch in enumerate(loader):
    ...         with session.step(step):
    ...             train_one(batch)
"""

from telemetry.callsites import (
    capture_tensor_observations,
    is_observing_tensor,
    observe_layer_residuals,
    observe_tensor,
    suspend_tensor_observations,
)
from telemetry.collect.plan import Plan
from telemetry.collect.report import SessionReport
from telemetry.collect.session import Session
from telemetry.collect.watch import watch
from telemetry.errors import RankfoldError
from telemetry.layout import ParallelLayout
from telemetry.placement import FlatShard, Owned, Partial, Placement, RankRelation, Replica, Shard
from telemetry.presence import Presence
from telemetry.protocol import Aggregator, Deadlines
from telemetry.sites import SIGNALS
from telemetry.version import VERSION

__version__ = VERSION

__all__ = [
    "SIGNALS",
    "Aggregator",
    "Deadlines",
    "FlatShard",
    "Owned",
    "ParallelLayout",
    "Partial",
    "Placement",
    "Plan",
    "Presence",
    "RankRelation",
    "RankfoldError",
    "Replica",
    "Session",
    "SessionReport",
    "Shard",
    "__version__",
    "capture_tensor_observations",
    "is_observing_tensor",
    "observe_layer_residuals",
    "observe_tensor",
    "suspend_tensor_observations",
    "watch",
]
