"""The tests that every sink must pass, as a class to subclass in a pytest suite.

Example::

    class TestMySink(SinkContract):
        def make_sink(self, folder):
            return MySink(folder / "out")

        def steps_in(self, sink, folder):
            return read_my_steps(folder / "out")
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from aggregator.catalogue import MergedStep
from aggregator.sinks.admission import admit_sinks
from aggregator.sinks.protocol import CAPABILITIES, ExactingSink, RunInfo, RunPlan, Sink
from aggregator.testing.packets import make_packet, make_site, make_step, make_steps
from telemetry.presence import Presence
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize

__all__ = ["SinkContract"]


def _run(segment: int = 0, resume_step: int | None = None) -> RunInfo:
    return RunInfo("0123456789abcdef", segment, resume_step, 2, DEFAULT_DESCRIPTOR, {"name": "contract"})


def _steps(first: int, last: int) -> list[MergedStep]:
    """Steps with everything that a sink must be able to meet: growth, absences, non-finite data, findings, gaps."""
    plain, odd, late = make_site("layers.0"), make_site("b:x_y-z.0", "gradient"), make_site("late", "router_logits")
    sampled = make_site("w", "update", numel=1000, estimated=True)
    packets = []
    for step in range(first, last + 1):
        observed = {
            plain: summarize(torch.tensor([-2.0, 0.0, 1e-12, 1e12]), histogram=True),
            odd: summarize(torch.tensor([math.nan, math.inf, -math.inf]), histogram=True),
            sampled: summarize(torch.full((10,), 0.5)),
        }
        if step > first:
            observed[late] = summarize(torch.empty(0))
        failed = {make_site("broken"): (Presence.CAPTURE_FAILED, "RuntimeError: no tensor")}
        findings = [{"code": "replica_divergence", "message": "rank 1 differs", "value": math.nan}]
        packets.append(make_packet(step, observed, unobserved=failed, world_size=2, findings=findings))
    return make_steps(packets)


class SinkContract:
    """Subclass, implement the two methods, and pytest runs the tests below against the sink."""

    def make_sink(self, folder: Path) -> Sink:
        """Return a sink that is not open; the same ``folder`` means the same target."""
        raise NotImplementedError

    def steps_in(self, sink: Sink, folder: Path) -> Sequence[int]:
        """Return the step numbers that arrived at the target, in order; ``sink`` is closed."""
        raise NotImplementedError

    def _deliver(self, sink: Sink, run: RunInfo, steps: Sequence[MergedStep]) -> None:
        # At attach, only the sites of parameters are known.
        admit_sinks([sink], RunPlan(steps[0].sites[:1], run.descriptor))
        sink.open(run)
        for step in steps:
            sink.emit(step)
        sink.flush()
        sink.close()

    def test_it_has_a_name_and_claims_only_known_capabilities(self, tmp_path: Path) -> None:
        """Reports and refusals use both."""
        sink = self.make_sink(tmp_path)
        assert isinstance(sink, Sink)
        assert sink.name
        assert sink.capabilities <= CAPABILITIES
        if isinstance(sink, ExactingSink):
            assert sink.wanted <= CAPABILITIES
            assert list(sink.disclosures) == []

    def test_it_touches_nothing_before_it_is_opened(self, tmp_path: Path) -> None:
        """The constructor runs on every rank."""
        threads = set(threading.enumerate())
        self.make_sink(tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert set(threading.enumerate()) <= threads

    def test_it_travels_to_the_process_that_opens_it(self, tmp_path: Path) -> None:
        """The root of the merge may be an actor elsewhere."""
        sink = pickle.loads(pickle.dumps(self.make_sink(tmp_path)))
        self._deliver(sink, _run(), _steps(1, 2))
        assert list(self.steps_in(sink, tmp_path)) == [1, 2]

    def test_every_step_arrives_once_and_in_order_whatever_is_in_it(self, tmp_path: Path) -> None:
        """Absent, non-finite, empty and sampled observations, late sites and missing ranks are all normal."""
        sink = self.make_sink(tmp_path)
        self._deliver(sink, _run(), _steps(5, 12))
        assert list(self.steps_in(sink, tmp_path)) == list(range(5, 13))

    def test_a_step_without_any_observation_is_legal(self, tmp_path: Path) -> None:
        """A step can be logged when every rank had to abstain."""
        sink = self.make_sink(tmp_path)
        packet = make_packet(3, {}).abstaining("too many steps in flight")
        self._deliver(sink, _run(), [make_step(packet)])
        assert list(self.steps_in(sink, tmp_path)) == [3]

    def test_it_leaves_the_step_as_it_was(self, tmp_path: Path) -> None:
        """Its siblings receive the same object."""
        steps = _steps(1, 2)
        before = [step.packet.to_bytes() for step in steps]
        self._deliver(self.make_sink(tmp_path), _run(), steps)
        assert [step.packet.to_bytes() for step in steps] == before

    def test_it_works_in_a_thread_that_did_not_make_it(self, tmp_path: Path) -> None:
        """Each sink is driven by a thread of its own."""
        sink, failures = self.make_sink(tmp_path), []

        def drive() -> None:
            try:
                self._deliver(sink, _run(), _steps(1, 3))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=drive)
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert failures == []
        assert list(self.steps_in(sink, tmp_path)) == [1, 2, 3]

    def test_it_closes_without_having_been_opened(self, tmp_path: Path) -> None:
        """Close is also what follows a failed open."""
        self.make_sink(tmp_path).close()

    def test_a_segment_that_begins_in_the_same_process_brings_its_steps_again(self, tmp_path: Path) -> None:
        """The training went back to a checkpoint without a new process."""
        sink = self.make_sink(tmp_path)
        sink.open(_run())
        for step in _steps(1, 4):
            sink.emit(step)
        if (begin_segment := getattr(sink, "begin_segment", None)) is not None:
            begin_segment(_run(segment=1, resume_step=3))
        for step in _steps(3, 6):
            sink.emit(step)
        sink.close()
        assert list(self.steps_in(sink, tmp_path))[-4:] == [3, 4, 5, 6]

    def test_a_resumed_attempt_continues_the_target_with_its_own_steps(self, tmp_path: Path) -> None:
        """The second attempt opens a new object on the same target and replays from step 3."""
        self._deliver(self.make_sink(tmp_path), _run(), _steps(1, 4))
        resumed = self.make_sink(tmp_path)
        self._deliver(resumed, _run(segment=1, resume_step=3), _steps(3, 6))
        assert list(self.steps_in(resumed, tmp_path))[-4:] == [3, 4, 5, 6]
