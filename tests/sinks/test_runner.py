"""One sink's trouble is its own: late, failed, full, and what the reports then say."""

import threading

import pytest
import torch

from aggregator.sinks import MemorySink, RunInfo, RunPlan, SinkRunner, admit_sinks, require_valid_sinks
from aggregator.testing import make_packet, make_site, make_steps
from telemetry.errors import ConfigurationError, SinkCapabilityError, SinkDuplicateError
from telemetry.presence import Presence
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize

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


class PickySink(MemorySink):
    name = "picky"

    def __init__(self, wanted=(), refusal=None):
        super().__init__()
        self.wanted, self.refusal, self.plan = frozenset(wanted), refusal, None
        self.disclosures = ()

    def admit(self, plan):
        self.plan = plan
        if self.refusal:
            raise self.refusal

    def emit(self, step):
        super().emit(step)
        self.disclosures = (f"saw step {step.step}",)


def test_a_capability_that_is_asked_for_and_not_carried_is_refused_by_name():
    with pytest.raises(SinkCapabilityError, match="'picky' was asked for image"):
        require_valid_sinks([MemorySink(), PickySink(wanted=["image"])])
    with pytest.raises(ConfigurationError, match="smell"):
        require_valid_sinks([PickySink(wanted=["smell"])])


def test_every_sink_judges_the_plan_before_any_is_opened():
    plan, refusal = RunPlan((make_site("a"),), DEFAULT_DESCRIPTOR), ConfigurationError("not this one")
    content, picky = PickySink(wanted=["scalar"]), PickySink(refusal=refusal)
    with pytest.raises(ConfigurationError, match="not this one"):
        admit_sinks([MemorySink(), content, picky], plan)
    assert content.plan is plan
    assert content.run is None


def mixed_steps(count):
    absent = {make_site("gone"): (Presence.SITE_ABSENT, "did not run")}
    observed = {make_site(name): summarize(torch.ones(2)) for name in "ab"}
    return make_steps(make_packet(step, observed, unobserved=absent) for step in range(count))


def test_the_ledger_accounts_for_every_scheduled_observation_in_every_sink():
    good, bad, twin = PickySink(), FailingSink("emit", at_step=2), PickySink()
    runner = SinkRunner([good, bad, twin], RUN)
    for step in mixed_steps(5):
        runner.emit(step)
    first, failed, second = runner.close(DEADLINE_S)
    assert first.observations == second.observations == {"observed": 10, "site_absent": 5}
    assert failed.observations == {"observed": 4, "site_absent": 2, "dropped": 9}
    assert (first.name, second.name, first.disclosures) == ("picky", "picky", ("saw step 4",))
    assert "ok, 5 steps (10 observed, 5 site_absent)" in str(first)
    assert "emit of step 2: OSError: disk full" in str(failed)


def test_the_ledger_counts_what_a_full_queue_dropped_and_what_a_late_sink_still_has_to_take():
    slow = GatedSink("emit")
    runner = SinkRunner([slow], RUN, queue_steps=2)
    first, *others = mixed_steps(6)
    runner.emit(first)
    assert slow.entered.wait(DEADLINE_S)
    for step in others:
        runner.emit(step)
    (late,) = runner.close(0.1)
    assert late.observations == {"dropped": 9, "waiting": 9}
    slow.gate.set()
