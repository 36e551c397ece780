"""Observing holds a constant amount of memory, on the GPU and on the host, however long the run is."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import telemetry
from launch.gates import Gate, Limit, Needs, NotRunError, Trial
from launch.gates.model import SmallDecoder, loss_of, make_tokens
from launch.gates.ranks import run_on_ranks, start_ranks, values_of_ranks

GATE = Gate(
    name="memory",
    purpose="memory of GPU and host is flat over logged steps, and off cadence the GPU needs none",
    procedure=(
        "A decoder trains under DDP with all signals and histograms recorded at every step. The highest GPU memory "
        "of a window of steps, and the resident memory of the process after it, are read once the buffers are filled "
        "and again after many logged steps. Rank zero writes the record and folds its files, for which it has a limit "
        "of its own; of the others the one with the largest growth counts. Another copy trains unobserved and then "
        "attached without a due step, and the highest GPU memory of both is compared."
    ),
    needs=Needs(gpus_per_node=2),
    limits=(
        Limit("logged steps between the windows", "at least", 200),
        Limit("growth of resident host memory", "at most", 4, "MiB"),
        Limit("growth of resident host memory of the rank that writes", "at most", 96, "MiB"),
        Limit("growth of the highest GPU memory allocated", "at most", 0, "MiB", on_gpu_only=True),
        Limit("growth of the GPU memory reserved", "at most", 2, "MiB", on_gpu_only=True),
        Limit("highest GPU memory off cadence beyond the unobserved", "at most", 4, "MiB", on_gpu_only=True),
    ),
    rehearsal="memory of the host; a CPU has no allocator that counts, so the GPU's memory is not measured",
    deadline_s=300.0,
)
NEVER = 10**9
MIB = 1 << 20
# Folding takes its memory the first time that 64 files are there.
WARM_STEPS, WINDOW = 200, 10
BETWEEN_ON_CPU, BETWEEN_ON_GPU = 240, 1500


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and return the growth."""
    if trial.num_nodes * trial.num_ranks < 2:
        raise NotRunError("one rank alone always writes; the gate needs two")
    return start_ranks(trial)


class Job:
    """One copy of the model in training."""

    def __init__(self, device: torch.device) -> None:
        model = SmallDecoder(1, 8, head_width=64 if device.type == "cuda" else 4).to(device)
        self._device, self._step = device, 0
        self.called = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.session: telemetry.Session | None = None

    def train(self, num_steps: int) -> None:
        """Train some steps, observed while there is a session."""
        for _ in range(num_steps):
            self._step += 1
            batch = make_tokens(self._step, dist.get_rank(), 2, 16)
            with nullcontext() if self.session is None else self.session.step(self._step):
                self.optimizer.zero_grad()
                loss_of(self.called, batch, self._device).backward()
                self.optimizer.step()

    @contextmanager
    def watched(self, to: Path, **options: Any) -> Iterator[None]:
        """Observe the steps inside of the block."""
        with telemetry.watch(self.called, optimizer=self.optimizer, to=to, **options) as self.session:
            yield
        self.session = None

    def window(self) -> dict[str, float]:
        """Train a window, and return what memory it took at most, in MiB."""
        if self._device.type != "cuda":
            self.train(WINDOW)
            return {"resident": resident_bytes() / MIB}
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self.train(WINDOW)
        torch.cuda.synchronize(self._device)
        allocated, reserved = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        return {"resident": resident_bytes() / MIB, "allocated": allocated / MIB, "reserved": reserved / MIB}


def measure(device: torch.device, to: Path) -> dict[str, object]:
    """Train in all ways; every rank runs this."""
    off_cadence = beyond_unobserved(device, to / "off-cadence")
    between = BETWEEN_ON_GPU if device.type == "cuda" else BETWEEN_ON_CPU
    job = Job(device)
    with job.watched(to / "on-cadence", every=1, hist_every=1):
        job.train(WARM_STEPS)
        first = job.window()
        job.train(between)
        last = job.window()
    growth = {name: last[name] - first[name] for name in first}
    ranks = values_of_ranks(
        [growth["resident"], growth.get("allocated", 0.0), growth.get("reserved", 0.0), off_cadence], device
    )
    resident, allocated, reserved, beyond = ([row[index] for row in ranks] for index in range(4))
    found: dict[str, object] = {
        "logged steps between the windows": between,
        "growth of resident host memory": max(resident[1:]),
        "growth of resident host memory of the rank that writes": resident[0],
        "first and last window on rank 0, MiB": [first, last],
    }
    if device.type == "cuda":
        found["growth of the highest GPU memory allocated"] = max(allocated)
        found["growth of the GPU memory reserved"] = max(reserved)
        found["highest GPU memory off cadence beyond the unobserved"] = max(beyond)
    return found


def beyond_unobserved(device: torch.device, to: Path) -> float:
    """Return how much more GPU memory a window takes at most with a session attached and no step due, in MiB."""
    job = Job(device)
    job.train(WINDOW)
    unobserved = job.window()
    with job.watched(to, every=NEVER, first_step=False):
        attached = job.window()
    gc.collect()
    return attached.get("allocated", 0.0) - unobserved.get("allocated", 0.0)


def resident_bytes() -> int:
    """Return the resident memory of this process; where there is no /proc, its highest so far."""
    gc.collect()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    run_on_ranks(measure)
