"""One sink's trouble is its own: late, failed, full, and what the reports then say."""

import threading

import pytest

from aggregator.sinks import MemorySink, RunInfo, SinkRunner
from aggregator.testing import make_packet, make_steps
from telemetry.errors import ConfigurationError, SinkDuplicateError
from telemetry.summary import DEFAULT_DESCRIPTOR

RUN = RunInfo("run", 0, None, 1, DEFAULT_DESCRIPTOR, {})
DEADLINE_S = 20.0


def steps(count):
    return make_steps(make_packet(step, {}) for step in range(count))


class GatedSink(MemorySink):
    """Waits in one call until the test lets it go on."""

    def __init__(self, call):
        super().__init__()
        self.call, self.entered, self.gate = call, threading.Event(), threading.Event()

    def wait_in(self, call):
        if call == self.call:
            self.entered.set()
            assert self.gate.wait(DEADLINE_S)

    def open(self, run):
        self.wait_in("open")
        super().open(run)

    def emit(self, step):
        self.wait_in("emit")
        super().emit(step)


class FailingSink(MemorySink):
    name = "failing"

    def __init__(self, call, at_step=0):
        super().__init__()
        self.call, self.at_step = call, at_step

    def open(self, run):
        if self.call == "open":
            raise ConnectionError("no route")

    def emit(self, step):
        if self.call == "emit" and step.step == self.at_step:
            raise OSError("disk full")
        super().emit(step)

    def close(self):
        super().close()
        if self.call == "close":
            raise ValueError("cannot finish")


def test_a_sink_that_is_slow_to_start_loses_nothing():
    slow, quick = GatedSink("open"), MemorySink()
    runner = SinkRunner([slow, quick], RUN)
    for step in steps(64):
        runner.emit(step)
    slow.gate.set()
    reports = runner.close(DEADLINE_S)
    assert [(report.state, report.num_emitted, report.num_dropped) for report in reports] == [("ok", 64, 0)] * 2
    assert [step.step for step in slow.steps] == list(range(64))


def test_a_sink_that_is_still_starting_at_close_is_late_and_holds_up_nobody():
    slow, quick = GatedSink("open"), MemorySink()
    runner = SinkRunner([quick, slow], RUN)
    for step in steps(3):
        runner.emit(step)
    ok, late = runner.close(1.5)
    assert (late.state, late.num_emitted, late.num_dropped) == ("late", 0, 0)
    assert late.detail == "still in open, 3 steps wait"
    assert (ok.state, ok.num_emitted) == ("ok", 3)
    slow.gate.set()


def test_steps_beyond_the_bound_are_dropped_and_counted():
    slow = GatedSink("emit")
    runner = SinkRunner([slow], RUN, queue_steps=4)
    first, *others = steps(11)
    runner.emit(first)
    assert slow.entered.wait(DEADLINE_S)
    for step in others:
        runner.emit(step)
    slow.gate.set()
    (report,) = runner.close(DEADLINE_S)
    assert (report.state, report.num_emitted, report.num_dropped) == ("ok", 5, 6)
    assert [step.step for step in slow.steps] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("call", "emitted", "dropped"), [("open", 0, 5), ("emit", 2, 3), ("close", 5, 0)])
def test_a_sink_that_raises_is_out_with_its_reason_and_its_siblings_go_on(call, emitted, dropped):
    bad, good = FailingSink(call, at_step=2), MemorySink()
    runner = SinkRunner([bad, good], RUN)
    for step in steps(5):
        runner.emit(step)
    failed, ok = runner.close(DEADLINE_S)
    assert (failed.name, failed.state, failed.num_emitted, failed.num_dropped) == (
        "failing",
        "failed",
        emitted,
        dropped,
    )
    assert failed.detail.startswith(call)
    assert "Error: " in failed.detail
    assert bad.closed
    assert (ok.state, ok.num_emitted) == ("ok", 5)


def test_the_same_object_twice_is_refused_before_anything_opens():
    sink = MemorySink()
    with pytest.raises(SinkDuplicateError, match="memory"):
        SinkRunner([sink, MemorySink(), sink], RUN)
    assert sink.run is None


def test_what_is_no_sink_is_refused():
    odd = MemorySink()
    odd.capabilities = frozenset({"smell"})
    for sink, text in ((print, "no sink"), (MemorySink, "no sink"), (odd, "smell")):
        with pytest.raises(ConfigurationError, match=text):
            SinkRunner([sink], RUN)
