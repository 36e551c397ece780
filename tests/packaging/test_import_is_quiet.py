"""Importing a package sets up no logging, reads no environment and loads no optional library."""

import subprocess
import sys

import pytest

AUDIT = """
import importlib, logging, os, sys
import numpy, torch                                   # theirs may do as they like

root_before = (logging.root.level, tuple(logging.root.handlers))
modules_before = set(sys.modules)
reads = []
read = type(os.environ).__getitem__

def audited(environ, key):
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    if frame.f_globals["__name__"].partition(".")[0] in ("telemetry", "aggregator", "launch"):
        reads.append((frame.f_globals["__name__"], key))
    return read(environ, key)

type(os.environ).__getitem__ = audited
importlib.import_module(sys.argv[1])
type(os.environ).__getitem__ = read

assert not reads, reads
assert (logging.root.level, tuple(logging.root.handlers)) == root_before
ours = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in ("telemetry", "aggregator")]
assert not [name for name in ours if logging.getLogger(name).handlers], ours
optional = {"ray", "wandb", "tensorboard", "mlflow", "comet_ml", "lightning", "transformers", "triton"}
optional |= {"plotly", "matplotlib"}
assert not optional & (set(sys.modules) - modules_before), optional & set(sys.modules)
"""


@pytest.mark.parametrize("package", ["telemetry", "aggregator", "launch"])
def test_importing_has_no_effect_but_the_import(package):
    done = subprocess.run([sys.executable, "-c", AUDIT, package], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
