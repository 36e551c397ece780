"""Naming a sink on a rank that never opens it costs none of the libraries behind it."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(60)
def test_making_sinks_imports_neither_tensorboard_nor_pyarrow():
    code = (
        "import sys, aggregator\n"
        "from aggregator.sinks import JsonlSink, TensorBoardSink\n"
        "TensorBoardSink('tb'), JsonlSink('m.jsonl')\n"
        "print([name for name in ('tensorboard', 'torch.utils.tensorboard', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"
