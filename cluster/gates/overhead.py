"""What observing costs a training step: next to nothing off cadence, a few percent on it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import telemetry
from launch.gates import Gate, Limit, Needs, Trial
from launch.gates.model import SmallDecoder, loss_of, make_tokens
from launch.gates.ranks import run_on_ranks, start_ranks

GATE = Gate(
    name="overhead",
    purpose="an observed step costs at most 1 % more off cadence, and 5 % more with three signals at every step",
    procedure=(
        "Copies of one decoder train under DDP unobserved, observed off cadence, and with parameters, gradients and "
        "updates recorded at every step. A block is a turn of each in an order drawn anew. A turn is several steps "
        "between two synchronisations of all ranks, after one step that is not timed. Each block gives ratios to the "
        "unobserved turn; their median over the blocks counts."
    ),
    needs=Needs(gpus_per_node=1),
    limits=(
        Limit("blocks measured", "at least", 5),
        Limit("steps recorded off cadence after the first", "equal to", 0),
        Limit("steps on cadence that were not recorded", "equal to", 0),
        Limit("time of a step off cadence, relative", "at most", 1.01, on_gpu_only=True),
        Limit("time of a step on cadence, relative", "at most", 1.05, on_gpu_only=True),
    ),
    rehearsal="that turns alternate and that observed steps are recorded; times of a shared CPU are not judged",
    deadline_s=600.0,
)
NEVER = 10**9
WAYS = {"unobserved": None, "off cadence": NEVER, "on cadence": 1}
SIGNALS = ("parameters", "gradients", "updates")


@dataclass(frozen=True)
class Size:
    """Of the model, its batches and the measurement."""

    num_blocks: int
    num_heads: int
    head_width: int
    num_sequences: int
    length: int
    num_turns: int
    turn_steps: int


ON_GPU = Size(num_blocks=8, num_heads=16, head_width=64, num_sequences=8, length=2048, num_turns=15, turn_steps=4)
ON_CPU = Size(num_blocks=2, num_heads=8, head_width=8, num_sequences=4, length=64, num_turns=5, turn_steps=3)


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and return the ratios."""
    return start_ranks(trial)


class Way:
    """One way to train: its own copy of the model, and the session that observes it, if one does."""

    def __init__(self, every: int | None, size: Size, device: torch.device, to: Path, stack: ExitStack) -> None:
        self._size, self._device, self._step = size, device, 0
        self._model = SmallDecoder(size.num_blocks, size.num_heads, head_width=size.head_width).to(device)
        self._called = DistributedDataParallel(self._model, device_ids=[device] if device.type == "cuda" else None)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._session = None
        if every is not None:
            options: dict[str, Any] = {"every": every, "hist_every": None, "signals": SIGNALS}
            session = telemetry.watch(self._called, optimizer=self._optimizer, to=to, **options)
            self._session = stack.enter_context(session)
        inputs, targets = make_tokens(1, dist.get_rank(), size.num_sequences, size.length)
        self._batch = (inputs.to(device), targets.to(device))

    def _scope(self) -> AbstractContextManager[Any]:
        self._step += 1
        return nullcontext() if self._session is None else self._session.step(self._step)

    def train_step(self) -> None:
        """Train one step."""
        with self._scope():
            self._optimizer.zero_grad()
            loss_of(self._called, self._batch, self._device).backward()
            self._optimizer.step()

    def take_turn(self) -> float:
        """Train a turn, and return its seconds; all ranks begin together, and the last one to end counts."""
        self.train_step()
        self._wait_for_all()
        started = time.perf_counter()
        for _ in range(self._size.turn_steps):
            self.train_step()
        self._wait_for_all()
        return time.perf_counter() - started

    def _wait_for_all(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier()

    @property
    def num_recorded(self) -> int:
        """Steps that the closed session has recorded, 0 without one."""
        return 0 if self._session is None or self._session.report is None else self._session.report.num_logged

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._step


def measure(device: torch.device, to: Path) -> dict[str, object]:
    """Let the ways take turns; every rank runs this."""
    size = ON_GPU if device.type == "cuda" else ON_CPU
    with ExitStack() as stack:
        ways = {name: Way(every, size, device, to / name.replace(" ", "-"), stack) for name, every in WAYS.items()}
        for way in ways.values():
            way.train_step()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for order in orders(list(ways), size.num_turns):
            for name in order:
                seconds[name].append(ways[name].take_turn())
    off, on = (ratios(seconds[name], seconds["unobserved"]) for name in ("off cadence", "on cadence"))
    return {
        "blocks measured": len(off),
        # The first step of a session is always recorded.
        "steps recorded off cadence after the first": ways["off cadence"].num_recorded - 1,
        "steps on cadence that were not recorded": ways["on cadence"].num_steps - ways["on cadence"].num_recorded,
        "time of a step off cadence, relative": statistics.median(off),
        "time of a step on cadence, relative": statistics.median(on),
        "ranges over the blocks": {"off cadence": [min(off), max(off)], "on cadence": [min(on), max(on)]},
        "ms of an unobserved step, median": 1e3 * statistics.median(seconds["unobserved"]) / size.turn_steps,
    }


def orders(names: Sequence[str], num_blocks: int) -> Iterator[list[str]]:
    """Yield an order for each block, the same on every rank."""
    drawn = random.Random(0)
    for _ in range(num_blocks):
        yield drawn.sample(names, len(names))


def ratios(seconds: Sequence[float], unobserved: Sequence[float]) -> list[float]:
    """Return the ratio of each block."""
    return [observed / baseline for observed, baseline in zip(seconds, unobserved, strict=True)]


if __name__ == "__main__":
    run_on_ranks(measure)
