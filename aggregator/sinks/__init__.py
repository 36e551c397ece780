"""Where a run is shown besides its record: TensorBoard, JSON lines, this process's memory, and what users add."""

from aggregator.sinks.admission import admit_sinks, require_valid_sinks
from aggregator.sinks.jsonl import JsonlSink
from aggregator.sinks.memory import MemorySink
from aggregator.sinks.protocol import CAPABILITIES, ExactingSink, RunInfo, RunPlan, Sink
from aggregator.sinks.runner import SinkRunner
from aggregator.sinks.tensorboard import TensorBoardSink

__all__ = [
    "CAPABILITIES",
    "ExactingSink",
    "JsonlSink",
    "MemorySink",
    "RunInfo",
    "RunPlan",
    "Sink",
    "SinkRunner",
    "TensorBoardSink",
    "admit_sinks",
    "require_valid_sinks",
]
