"""What the package shows, and what importing it must not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import aggregator.collective

ROOT = Path(aggregator.collective.__file__).parent


def test_the_package_exports_the_aggregator_and_nothing_else():
    assert aggregator.collective.__all__ == ["CollectiveAggregator"]


def test_only_the_transport_communicates_through_torch():
    users = [path.name for path in ROOT.glob("*.py") if "torch" in path.read_text().split("__all__")[0].split('"""')[2]]
    assert users == ["transport.py"]


def test_importing_reads_no_environment_starts_no_thread_and_loads_no_recorder():
    script = """
import os, sys, threading, torch.distributed, numpy
import telemetry.protocol
class Watched(dict):
    def __getitem__(self, key): raise AssertionError(f"environment read: {key}")
    get = __getitem__
os.environ = Watched()
import aggregator.collective
assert threading.active_count() == 1
assert "aggregator.recorder" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
