"""Names the machine that a benchmark ran on, because a number without one says nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe_machine() -> str:
    """Return processor, cores, memory and versions in one line."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, {device}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    )
