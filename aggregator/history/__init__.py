"""The record of a run on disk: written by one process, readable by any, exact and durable to the last commit."""

from aggregator.history.folding import FoldingPolicy
from aggregator.history.follow import Cursor, Followed
from aggregator.history.group import GroupCommit
from aggregator.history.reader import History, open_history, recent_history
from aggregator.history.verify import verify
from aggregator.history.writer import HistoryWriter

__all__ = [
    "Cursor",
    "FoldingPolicy",
    "Followed",
    "GroupCommit",
    "History",
    "HistoryWriter",
    "open_history",
    "recent_history",
    "verify",
]
