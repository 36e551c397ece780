"""Where a run is shown besides its record: trackers, JSON lines, this process's memory, and what users add."""

from aggregator.sinks.admission import admit_sinks, require_valid_sinks
from aggregator.sinks.comet import CometSink
from aggregator.sinks.jsonl import JsonlSink
from aggregator.sinks.memory import MemorySink
from aggregator.sinks.metric_logger import MetricLoggerSink
from aggregator.sinks.mlflow import MlflowSink
from aggregator.sinks.protocol import CAPABILITIES, ExactingSink, RunInfo, RunPlan, Sink
from aggregator.sinks.runner import SinkRunner
from aggregator.sinks.tensorboard import TensorBoardSink
from aggregator.sinks.wandb import WandbSink

__all__ = [
    "CAPABILITIES",
    "CometSink",
    "ExactingSink",
    "JsonlSink",
    "MemorySink",
    "MetricLoggerSink",
    "MlflowSink",
    "RunInfo",
    "RunPlan",
    "Sink",
    "SinkRunner",
    "TensorBoardSink",
    "WandbSink",
    "admit_sinks",
    "require_valid_sinks",
]
