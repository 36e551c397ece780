"""Whatever is done in whatever order, the record holds what was acknowledged, once, and every reader agrees."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aggregator.catalogue import Catalogue
from aggregator.history import FoldingPolicy, GroupCommit, HistoryWriter, open_history, verify
from aggregator.testing.packets import make_packet, make_site, make_step
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize
from tests.history.test_crash import DEADLINE_S

STEADY = make_site("steady")


class HistoryMachine(RuleBasedStateMachine):
    """Write, commit, crash, resume, fold, drift and read, against a dictionary of what must be there."""

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp()) / "run"
        self.durable = {}  # step → (segment, numel of the drifting site)
        self.pending = {}
        self.numel = 2
        self.next_step = 0

    @initialize()
    def begin(self):
        self.open(None)

    def open(self, resume_step):
        self.writer = HistoryWriter.create(
            self.path,
            {},
            DEFAULT_DESCRIPTOR,
            resume_step,
            group=GroupCommit(4, 3600.0, 0.0),
            folding=FoldingPolicy((3, 2), grace_s=0.0),
        )
        self.catalogue = Catalogue()

    def step(self):
        drifting = make_site("drifting", "parameter", numel=self.numel, placements=(("dp", "replica"),))
        values = torch.arange(float(self.numel)) + self.next_step
        observed = {STEADY: summarize(values, histogram=True), drifting: summarize(values)}
        return make_step(make_packet(self.next_step, observed), self.catalogue)

    def acknowledge(self):
        self.durable.update(self.pending)
        self.pending = {}

    @rule(gap=st.integers(1, 3))
    def append(self, gap):
        self.next_step += gap
        told = self.writer.append(self.step())
        self.pending[self.next_step] = (self.writer.segment, self.numel)
        if told.done():
            self.acknowledge()

    @rule()
    def commit(self):
        self.next_step += 1
        self.writer.commit(self.step())
        self.pending[self.next_step] = (self.writer.segment, self.numel)
        self.acknowledge()

    @rule()
    def flush(self):
        self.writer.flush()
        self.acknowledge()

    @rule()
    def drift(self):
        self.numel += 1

    @rule()
    def fold(self):
        assert self.writer.wait_folded(DEADLINE_S)

    @rule(back=st.integers(0, 6))
    def crash_and_resume(self, back):
        self.writer.abandon()
        self.resume(back)

    @precondition(lambda self: not self.pending)
    @rule(back=st.integers(0, 6))
    def close_and_resume(self, back):
        self.writer.close()
        self.resume(back)

    @rule(back=st.integers(0, 6))
    def begin_segment(self, back):
        self.acknowledge()
        start = self.forget(back)
        self.writer = self.writer.next_segment({}, DEFAULT_DESCRIPTOR, start)
        self.catalogue = Catalogue()

    def resume(self, back):
        self.pending = {}
        self.open(self.forget(back))

    def forget(self, back):
        start = max(0, max(self.durable, default=0) - back)
        self.durable = {step: kept for step, kept in self.durable.items() if step < start}
        self.next_step = start
        return start

    @invariant()
    def every_reader_sees_what_was_acknowledged(self):
        if not hasattr(self, "writer"):
            return
        history = open_history(self.path)
        steps = history.steps().select(["step", "segment"]).to_pydict()
        assert dict(zip(steps["step"], steps["segment"], strict=True)) == {n: s for n, (s, _) in self.durable.items()}
        assert steps["step"] == sorted(self.durable)
        if not self.durable:
            return
        rows = history.observations("drifting", columns=["step", "series", "total", "max"]).to_pylist()
        assert [(row["step"], row["total"]) for row in rows] == [(n, self.durable[n][1]) for n in sorted(self.durable)]
        assert all(row["max"] == row["step"] + row["total"] - 1 for row in rows)
        # One series for each run of steps with one numel, and never one that holds two.
        sizes = {}
        for row in rows:
            sizes.setdefault(row["series"], set()).add(row["total"])
        assert all(len(found) == 1 for found in sizes.values())

    def teardown(self):
        self.writer.close()
        assert verify(self.path).num_rows == 0
        shutil.rmtree(self.path.parent)


TestAnyOrder = HistoryMachine.TestCase
TestAnyOrder.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
