"""The record of a run on disk: written by one process, readable by any, exact and durable to the last commit."""

from aggregator.history.reader import History, open_history
from aggregator.history.writer import HistoryWriter

__all__ = ["History", "HistoryWriter", "open_history"]
