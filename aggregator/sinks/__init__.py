"""Where a run is shown besides its record: TensorBoard, JSON lines, this process's memory, and what users add."""

from aggregator.sinks.jsonl import JsonlSink
from aggregator.sinks.memory import MemorySink
from aggregator.sinks.protocol import CAPABILITIES, RunInfo, Sink
from aggregator.sinks.runner import SinkRunner, require_valid_sinks
from aggregator.sinks.tensorboard import TensorBoardSink

__all__ = [
    "CAPABILITIES",
    "JsonlSink",
    "MemorySink",
    "RunInfo",
    "Sink",
    "SinkRunner",
    "TensorBoardSink",
    "require_valid_sinks",
]
