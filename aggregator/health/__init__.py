"""Checks of the merged steps as a stream: what has gone wrong in the model, with the numbers that show it.

The checks of one step by itself, which need no memory, are in ``aggregator.checks``.
"""

from aggregator.health.monitor import HealthMonitor
from aggregator.health.thresholds import Thresholds

__all__ = ["HealthMonitor", "Thresholds"]
