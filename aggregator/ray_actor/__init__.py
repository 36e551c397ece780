"""Packets of all ranks meet in an actor of a Ray cluster; it records them, and outlives the ranks."""

from aggregator.ray_actor.aggregator import RayAggregator

__all__ = ["RayAggregator"]
