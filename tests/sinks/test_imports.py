"""Naming a sink on a rank that never opens it costs none of the libraries behind it."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(60)
def test_making_sinks_imports_no_tracker_and_no_pyarrow():
    code = (
        "import sys, aggregator\n"
        "from aggregator.sinks import CometSink, JsonlSink, MlflowSink, TensorBoardSink, WandbSink\n"
        "TensorBoardSink('tb'), JsonlSink('m.jsonl'), WandbSink(), MlflowSink(), CometSink()\n"
        "theirs = ('tensorboard', 'torch.utils.tensorboard', 'wandb', 'mlflow', 'comet_ml', 'pyarrow')\n"
        "print([name for name in theirs if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"
