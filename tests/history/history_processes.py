"""What other processes do to a run in the tests of the history; imported by them without pytest."""

from __future__ import annotations

import itertools
import os
import time
from functools import cache
from pathlib import Path

import torch

from aggregator.catalogue import Catalogue
from aggregator.history import FoldingPolicy, HistoryWriter
from aggregator.testing.packets import make_packet, make_site, make_step
from telemetry.errors import RankfoldError
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize
from tests.ranks import FORKSERVER

CONTEXT = FORKSERVER

SITES = tuple(make_site(f"layers.{i}") for i in range(3))


@cache
def packet_of(step: int):
    """Return a packet whose every number follows from its step."""
    values = torch.tensor([float(step), -1.0, 0.5])
    return make_packet(step, {site: summarize(values, histogram=True) for site in SITES})


def commit_and_tell(path: Path, first_step: int, last_step: int, resume_step: int | None, told) -> None:
    """Commit the steps in order and send each one after its commit has returned."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # See conftest.py.
    folding = FoldingPolicy(fan_in=(4, 4), grace_s=0.05)
    writer = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, resume_step, folding=folding)
    catalogue = Catalogue()
    for step in range(first_step, last_step + 1):
        writer.commit(make_step(packet_of(step), catalogue))
        told.send(step)
    writer.close()
    told.send(None)


def claim_at_barrier(path: Path, barrier, told) -> None:
    """Try to begin a run at the same moment as the others, and send the outcome."""
    barrier.wait(timeout=200)
    try:
        outcome = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR).run_id
    except RankfoldError as error:
        outcome = error.code
    told.put(outcome)


def append_and_tell(path: Path, fan_in: tuple[int, int], told, stop) -> None:
    """Append a step each 10 ms until told to stop, and send each one with the time at which it was appended."""
    torch.set_num_threads(1)
    writer = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, folding=FoldingPolicy(fan_in, grace_s=0.02))
    catalogue = Catalogue()
    for step in itertools.count():
        if stop.wait(0.01):
            break
        begun = time.monotonic()
        writer.append(make_step(packet_of(step), catalogue))
        told.send((step, begun))
    writer.close()
