"""Observing makes the host wait for the device never off cadence, and a constant number of times on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import telemetry
from launch.gates import Gate, Limit, Needs, Trial
from launch.gates.model import SmallDecoder, loss_of, make_tokens
from launch.gates.ranks import run_on_ranks, start_ranks, values_of_ranks
from launch.gates.waits import beyond, count_waits

GATE = Gate(
    name="zero-syncs",
    purpose="the host waits for the GPU never off cadence, and on it a constant number of times, whatever the depth",
    procedure=(
        "A decoder of two blocks and one of twelve train under DDP unobserved, observed off cadence, and with all five "
        "signals and histograms at every step. After the first steps CUDA's sync debug mode and the profiler count "
        "synchronisations and copies to the host; of three steps the smallest counts. Those of the unobserved step are "
        "subtracted, and the rank with the most counts. On cadence rows leave in one copy, and histograms in another."
    ),
    needs=Needs(gpus_per_node=1),
    limits=(
        Limit("host waits off cadence", "equal to", 0),
        Limit("host waits on cadence", "at most", 2),
        Limit("host waits on cadence", "at least", 1),
        Limit("host waits that more blocks add", "equal to", 0),
    ),
    rehearsal="which operators and methods are called that would wait on a GPU; not what CUDA does below them",
    deadline_s=240.0,
)
BLOCKS = (2, 12)
NEVER = 10**9
# The first steps allocate, and DDP arranges its buckets anew.
WARM_STEPS, COUNTED_STEPS = 4, 3


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and return the counts."""
    return start_ranks(trial)


def measure(device: torch.device, to: Path) -> dict[str, object]:
    """Count in every way to train; every rank runs this."""
    counts: dict[str, Any] = {}
    for num_blocks in BLOCKS:
        counts[f"unobserved, {num_blocks} blocks"] = waits_of(device, num_blocks, None)
        for word, every in (("off cadence", NEVER), ("on cadence", 1)):
            counts[f"{word}, {num_blocks} blocks"] = waits_of(device, num_blocks, every, to / f"{num_blocks}-{every}")
    extra = {
        f"{word}, {n} blocks": beyond(counts[f"{word}, {n} blocks"], counts[f"unobserved, {n} blocks"])
        for n in BLOCKS
        for word in ("off cadence", "on cadence")
    }
    highest = [max(values) for values in zip(*values_of_ranks(list(extra.values()), device), strict=True)]
    most = dict(zip(extra, map(int, highest), strict=True))
    few, many = BLOCKS
    return {
        "host waits off cadence": max(most[f"off cadence, {n} blocks"] for n in BLOCKS),
        "host waits on cadence": most[f"on cadence, {many} blocks"],
        "host waits that more blocks add": most[f"on cadence, {many} blocks"] - most[f"on cadence, {few} blocks"],
        "counts by sort on rank 0": {name: dict(count) for name, count in counts.items()},
    }


def waits_of(device: torch.device, num_blocks: int, every: int | None, to: Path | None = None) -> Counter[str]:
    """Train one decoder, and return the waits of a step by sort, the smallest of those counted."""
    model = SmallDecoder(num_blocks).to(device)
    called = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = (
        telemetry.watch(called, optimizer=optimizer, to=to, every=every, hist_every=every)
        if to is not None and every is not None
        else None
    )
    found = []
    for step in range(1, WARM_STEPS + COUNTED_STEPS + 1):
        batch = make_tokens(step, dist.get_rank(), 2, 8)
        batch = (batch[0].to(device), batch[1].to(device))
        with (
            count_waits(device) if step > WARM_STEPS else nullcontext(Counter()) as waits,
            session.step(step) if session else nullcontext(),
        ):
            optimizer.zero_grad()
            loss_of(called, batch, device).backward()
            optimizer.step()
        if step > WARM_STEPS:
            found.append(waits)
    if session:
        session.close()
    return Counter({sort: min(waits[sort] for waits in found) for sort in found[0]})


if __name__ == "__main__":
    run_on_ranks(measure)
