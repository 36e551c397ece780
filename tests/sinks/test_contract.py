"""Every sink of ours passes the suite that we give to others."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aggregator.sinks import JsonlSink, MemorySink, TensorBoardSink
from aggregator.sinks.jsonl import read_lines
from aggregator.testing import SinkContract
from tests.sinks.trackers import TRACKERS


class TestMemorySink(SinkContract):
    def make_sink(self, folder):
        return MemorySink()

    def steps_in(self, sink, folder):
        return [step.step for step in sink.steps]


class TestJsonlSink(SinkContract):
    def make_sink(self, folder):
        return JsonlSink(folder / "sub" / "metrics.jsonl")

    def steps_in(self, sink, folder):
        return [line["step"] for line in read_lines(folder / "sub" / "metrics.jsonl") if line["type"] == "step"]


class TestTensorBoardSink(SinkContract):
    def make_sink(self, folder):
        return TensorBoardSink(folder / "tb")

    def steps_in(self, sink, folder):
        events = EventAccumulator(str(folder / "tb"))
        events.Reload()
        return [event.step for event in events.Scalars("rankfold/ranks_merged")]


class TrackerContract(SinkContract):
    tracker = ""

    def make_sink(self, folder):
        return TRACKERS[self.tracker].make(folder)

    def steps_in(self, sink, folder):
        return TRACKERS[self.tracker].steps(folder)


class TestWandbSink(TrackerContract):
    tracker = "wandb"


class TestMlflowSink(TrackerContract):
    tracker = "mlflow"


class TestCometSink(TrackerContract):
    tracker = "comet"


class TestMetricLoggerSink(TrackerContract):
    tracker = "metric_logger"
