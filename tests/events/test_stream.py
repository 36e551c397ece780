"""The record as events: what each step becomes, who gets it, what is lost and counted, and who cannot hurt whom."""

import dataclasses
import logging
import math
import threading

import pytest
import torch

from aggregator.events import (
    EventStream,
    FindingEvent,
    HistogramEvent,
    ScalarEvent,
    UnavailableEvent,
)
from aggregator.sinks import RunInfo, SinkRunner
from aggregator.testing import SinkContract, make_packet, make_site, make_steps
from telemetry.errors import ConfigurationError, FieldUnknownError
from telemetry.presence import Presence
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize

ACTIVATION = make_site("layers.0")
WEIGHT, UPDATE = make_site("w", "parameter", shape=(2, 2)), make_site("w", "update", shape=(2, 2))
RUN = RunInfo("run", 0, None, 1, DEFAULT_DESCRIPTOR, {})


def steps(*observed, **options):
    return make_steps(make_packet(number, one, **options) for number, one in enumerate(observed, start=1))


def collect(stream, *given, **only):
    events = []
    stream.subscribe(events.append, **only)
    for step in given:
        stream.emit(step)
    return events


class TestEventStream(SinkContract):
    """It is a sink like any other."""

    def make_sink(self, folder):
        stream = EventStream()
        stream.queue()
        stream.arrived = stream.queue(types="scalar", fields="ranks_merged")
        return stream

    def steps_in(self, sink, folder):
        return [event.step for event in sink.arrived.take() if event.field == "ranks_merged"]


def test_a_number_is_finite_or_says_why_there_is_none():
    observed = {ACTIVATION: summarize(torch.tensor([3.0, -4.0])), WEIGHT: summarize(torch.tensor([math.nan]))}
    events = collect(EventStream(fields=("rms", "nonfinite")), *steps(observed), types="scalar")
    found = {(e.kind, e.site, e.field): (e.value, e.reason) for e in events if e.kind != "step"}
    assert found == {
        ("activation", "layers.0", "rms"): (math.sqrt(12.5), ""),
        ("activation", "layers.0", "nonfinite"): (0, ""),
        ("parameter", "w", "rms"): (None, "no finite element"),
        ("parameter", "w", "nonfinite"): (1, ""),
    }


def test_the_update_to_weight_ratio_is_a_series_of_its_own():
    given = steps(
        {WEIGHT: summarize(torch.full((4,), 2.0)), UPDATE: summarize(torch.full((4,), 0.5))},
        {WEIGHT: summarize(torch.zeros(4)), UPDATE: summarize(torch.full((4,), 0.5))},
        {UPDATE: summarize(torch.full((4,), 0.5))},
    )
    events = collect(EventStream(), *given, types="scalar", fields="update_to_weight")
    assert [(e.step, e.kind, e.value, bool(e.reason)) for e in events] == [
        (1, "update", 0.25, False),
        (2, "update", None, True),
    ]


def test_an_observation_without_numbers_is_an_event_with_presence_and_reason():
    given = steps({}, unobserved={ACTIVATION: (Presence.UNSUPPORTED, "sparse")})
    (event,) = collect(EventStream(), *given, types="unavailable")
    assert event == UnavailableEvent(1, "activation", "layers.0", Presence.UNSUPPORTED, "sparse")


def test_a_histogram_keeps_its_counts_and_nobody_can_change_them():
    summary = summarize(torch.tensor([1.0, 2.0, math.inf]), histogram=True)
    (event,) = collect(EventStream(), *steps({ACTIVATION: summary}), types="histogram")
    assert event.histogram == summary.histogram
    with pytest.raises(ValueError, match="read-only"):
        event.histogram.counts[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 2


def test_a_finding_arrives_whole_and_last():
    finding = {"code": "nonfinite_values", "message": "NaN", "site": "layers.0", "kind": "activation", "rank": 3}
    events = collect(EventStream(), *steps({ACTIVATION: summarize(torch.ones(2), histogram=True)}, findings=[finding]))
    assert events[-1] == FindingEvent(1, "activation", "layers.0", "nonfinite_values", "NaN", finding)
    assert {type(event) for event in events} == {ScalarEvent, HistogramEvent, FindingEvent}


def test_a_receiver_gets_what_it_asked_for():
    observed = {
        make_site(f"layers.{i}", kind): summarize(torch.ones(2)) for i in (0, 1) for kind in ("activation", "x")
    }
    events = collect(EventStream(), *steps(observed), types="scalar", kinds=("x",), sites="*.1", fields=("mean", "rms"))
    assert [(e.kind, e.site, e.field) for e in events] == [("x", "layers.1", "mean"), ("x", "layers.1", "rms")]


def test_a_queue_keeps_the_newest_events_and_counts_the_lost():
    stream = EventStream(fields=("mean",))
    queue = stream.queue(capacity=3, types="scalar", fields="mean")
    for step in steps(*[{ACTIVATION: summarize(torch.ones(1))}] * 5):
        stream.emit(step)
    assert (len(queue), queue.num_dropped, stream.num_dropped) == (3, 2, 2)
    assert [event.step for event in queue.take()] == [3, 4, 5]
    assert queue.take() == []


def test_no_queue_grows_beyond_its_bound_and_a_step_that_is_too_large_keeps_its_findings():
    stream = EventStream()
    queue = stream.queue()
    sites = {make_site(f"layers.{i}"): summarize(torch.ones(1)) for i in range(1000)}
    (step,) = steps(sites, findings=[{"code": "c", "message": "m"}])
    stream.emit(step)
    events = queue.take()
    assert len(events) == 4096
    assert events[-1].type == "finding"
    assert queue.num_dropped == 3 + 6 * 1000 + 1 - 4096


def test_a_loop_can_wait_for_events_and_is_woken_by_the_end():
    stream = EventStream()
    queue = stream.queue(types="finding")
    runner = SinkRunner([stream], RUN)
    (step,) = steps({}, findings=[{"code": "c", "message": "m"}])
    runner.emit(step)
    assert [event.code for event in queue.take(timeout_s=20)] == ["c"]
    waiting = threading.Thread(target=queue.take, args=(60,))
    waiting.start()
    runner.close(20)
    waiting.join(20)
    assert not waiting.is_alive()
    assert queue.is_ended


def test_a_subscriber_that_throws_is_warned_about_once_disabled_after_eight_and_hurts_nobody(caplog):
    stream = EventStream()
    heard = []
    broken = stream.subscribe(lambda event: 1 / 0, types="finding")
    healthy = stream.subscribe(heard.append, types="finding")
    findings = [{"code": "c", "message": str(i)} for i in range(20)]
    with caplog.at_level(logging.WARNING, logger="rankfold.events"):
        runner = SinkRunner([stream], RUN)
        runner.emit(steps({}, findings=findings)[0])
        (report,) = runner.close(20)
    assert (report.state, report.num_emitted) == ("ok", 1)
    assert [event.message for event in heard] == [finding["message"] for finding in findings]
    assert (broken.num_failures, broken.num_dropped, broken.is_disabled) == (8, 12, True)
    assert broken.last_failure == "ZeroDivisionError: division by zero"
    assert (healthy.num_delivered, healthy.is_disabled) == (20, False)
    assert [record.name for record in caplog.records] == ["rankfold.events"]


def test_seven_failures_and_a_success_begin_the_count_anew():
    stream = EventStream()
    seen = []

    def fail_seven_of_eight(event):
        seen.append(event)
        if len(seen) % 8:
            raise OSError("busy")

    subscription = stream.subscribe(fail_seven_of_eight, types="finding")
    stream.emit(steps({}, findings=[{"code": "c", "message": "m"}] * 80)[0])
    assert (subscription.num_failures, subscription.num_delivered, subscription.is_disabled) == (70, 10, False)


def test_a_stream_without_receivers_costs_a_look():
    stream = EventStream()
    (step,) = steps({ACTIVATION: summarize(torch.ones(1))})
    stream.emit(step)
    assert stream.num_dropped == 0


@pytest.mark.parametrize(
    ("use", "error", "says"),
    [
        (lambda: EventStream(fields=("speed",)), FieldUnknownError, "speed"),
        (lambda: EventStream().subscribe(3), ConfigurationError, "3 cannot be called"),
        (lambda: EventStream().subscribe(print, types="scalars"), ConfigurationError, "scalars"),
        (lambda: EventStream().queue(0), ConfigurationError, "0"),
        (lambda: EventStream().queue(5000), ConfigurationError, "4096"),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_asked_for(use, error, says):
    with pytest.raises(error, match=says):
        use()
