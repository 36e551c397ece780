"""Small runs for tests of the commands: whole, growing, superseded, damaged, empty, foreign, missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from aggregator.history import HistoryWriter
from aggregator.history.folding import FoldingPolicy
from aggregator.testing.packets import make_packet, make_site, make_steps
from telemetry.packet import StepFacts
from telemetry.presence import Presence
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize

__all__ = ["STATES", "STEPS", "make_run", "write_steps"]

STEPS = range(1, 9)
RECORD = {"model": "Net", "world_size": 2, "every": {"gradients": 1}, "hist_every": 2, "layout": {"axes": [["dp", 2]]}}
NO_FOLDING = FoldingPolicy((1000, 1000))

ACTIVATION, GRADIENT = make_site("layers.0"), make_site("layers.0.weight", "gradient", numel=4)
WEIGHT = make_site("layers.0.weight", "parameter", numel=4, placements=(("dp", "replica"),))
UPDATE = make_site("layers.0.weight", "update", numel=4)
DEAD, SICK = make_site("layers.1"), make_site("head.bias", "gradient", numel=4)


def make_packets(steps, *, factor: float = 1.0, segment: int = 0):
    """Yield a packet a step: one site grows, one is dead, one has a NaN from step 5 on, one is missing at step 3."""
    for step in steps:
        values = torch.tensor([1.0, -2.0, 3.0, 0.5]) * factor
        sick = torch.tensor([1.0, float("nan") if step >= 5 else 1.0, 0.0, 2.0])
        observed = {
            ACTIVATION: summarize(values * step, histogram=step % 2 == 0),
            GRADIENT: summarize(values / step, histogram=step % 2 == 0),
            WEIGHT: summarize(values),
            UPDATE: summarize(values * 0.01),
            DEAD: summarize(torch.tensor([0.0, 0.0, 0.0, 1e-3]) * (step < 2)),
            SICK: summarize(sick),
        }
        unobserved = {}
        if step == 3:
            del observed[ACTIVATION]
            unobserved = {ACTIVATION: (Presence.SITE_ABSENT, "the module did not run")}
        findings = (
            [{"code": "nonfinite_first_seen", "message": "NaN in head.bias", "site": "head.bias"}] if step == 5 else []
        )
        facts = StepFacts(num_applied=2, step_s=0.1, self_s=0.002, wall_time_s=1.7e9 + step, read_bytes=96)
        packet = make_packet(
            step, observed, unobserved=unobserved, facts=facts, findings=findings, world_size=2, segment=segment
        )
        yield replace(packet, ranks=(0, 1))


def write_steps(path: Path, steps=STEPS, *, factor: float = 1.0, resume_step: int | None = None, close: bool = True):
    """Write a segment and return its writer."""
    writer = HistoryWriter.create(path, RECORD, DEFAULT_DESCRIPTOR, resume_step, folding=NO_FOLDING)
    for step in make_steps(make_packets(steps, factor=factor, segment=writer.segment)):
        writer.commit(step)
    if close:
        writer.close()
    return writer


def _whole(path: Path) -> None:
    write_steps(path)


def _growing(path: Path) -> None:
    # What another process would see: nothing is sealed.
    write_steps(path, close=False).abandon()


def _superseded(path: Path) -> None:
    write_steps(path)
    write_steps(path, range(5, 10), factor=2.0, resume_step=5)


def _damaged(path: Path) -> None:
    write_steps(path)
    chunk = sorted((path / "seg-00000" / "c").iterdir())[2]
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 0x10
    chunk.write_bytes(data)


def _empty(path: Path) -> None:
    path.mkdir()


def _foreign(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


STATES = {
    "whole": _whole,
    "growing": _growing,
    "superseded": _superseded,
    "damaged": _damaged,
    "empty": _empty,
    "foreign": _foreign,
    "missing": lambda path: None,
}


def make_run(path: Path, state: str) -> Path:
    """Make the directory in one of ``STATES``."""
    STATES[state](path)
    return path
