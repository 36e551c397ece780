"""Packets of all ranks meet in a tree over the job's own network; rank zero records them."""

from aggregator.collective.aggregator import CollectiveAggregator

__all__ = ["CollectiveAggregator"]
