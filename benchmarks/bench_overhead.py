"""What observing costs a training step: interleaved ratios of observed to unobserved step time.

Every variant trains its own copy of one model on the same batches. A block is a turn of every variant, in an order
drawn anew; a turn is many steps of one variant in a row, so that what its merge and its history still do in the
background falls on its own next steps, as it does in a run. Each block gives one ratio, the sum of a variant's steps
over the sum of the unobserved ones; the table shows the median over blocks and their range.

    python benchmarks/bench_overhead.py [--blocks 5] [--rounds 50]
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import telemetry

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch" / "demo"))
from demo_model import ByteGPT, GPTConfig
from machine import describe_machine

NEVER = 10**9
WEIGHTS = ("parameters", "gradients", "updates")
VARIANTS: dict[str, dict[str, Any] | None] = {
    "unobserved": None,
    "attached, no step due": {"every": NEVER, "hist_every": None},
    "every=50": {"every": 50, "hist_every": None},
    "every=10": {"every": 10, "hist_every": None},
    "every=1": {"every": 1, "hist_every": None},
    "every=1, parameters, gradients, updates": {"every": 1, "hist_every": None, "signals": WEIGHTS},
    "every=1, with histograms": {"every": 1, "hist_every": 1},
}


@dataclass
class Variant:
    """One way to train, and the durations of its steps in seconds."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    session: telemetry.Session | None
    seconds: list[float] = field(default_factory=list)

    def train_step(self, step: int, batch: Tensor) -> None:
        """Train one step and keep its duration."""
        started = time.perf_counter()
        with self.session.step(step) if self.session else nullcontext():
            logits = self.model(batch[:, :-1])
            self.optimizer.zero_grad()
            cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)


def make_variants(original: nn.Module, root: Path, stack: ExitStack) -> list[Variant]:
    """Make every variant with a run directory of its own."""
    variants = []
    for index, (name, options) in enumerate(VARIANTS.items()):
        model = copy.deepcopy(original)
        optimizer = torch.optim.AdamW(model.parameters())
        session = None
        if options is not None:
            session = telemetry.watch(model, optimizer=optimizer, to=root / str(index), **options)
            stack.enter_context(session)
        variants.append(Variant(name, model, optimizer, session))
    return variants


def measure(variants: list[Variant], config: GPTConfig, args: argparse.Namespace) -> None:
    """Run all blocks; before them comes one step of each variant, the first, which is always logged."""
    batches = torch.randint(256, (args.rounds, args.batch, config.context + 1))
    for variant in variants:
        variant.train_step(1, batches[0])
        variant.seconds.clear()
    order = random.Random(0)
    for block in range(args.blocks):
        for variant in order.sample(variants, len(variants)):
            # One step that is not timed takes the caches over from the variant before.
            variant.train_step(2 + block * (args.rounds + 1), batches[0])
            variant.seconds.pop()
            for index in range(args.rounds):
                variant.train_step(3 + block * (args.rounds + 1) + index, batches[index])
        print(f"  block {block + 1} of {args.blocks}", file=sys.stderr, flush=True)


def ratios(variant: Variant, baseline: Variant, rounds: int) -> list[float]:
    """Return one ratio for each block."""
    starts = range(0, len(variant.seconds), rounds)
    return [sum(variant.seconds[i : i + rounds]) / sum(baseline.seconds[i : i + rounds]) for i in starts]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPTConfig(num_layers=args.layers, num_heads=6, width=args.width, context=args.context)
    model = ByteGPT(config)
    print(describe_machine())
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, batch {args.batch} × {config.context}")
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        variants = make_variants(model, Path(root), stack)
        measure(variants, config, args)
    baseline = variants[0]
    print(f"\n{'variant':<42}{'ms a step':>10}{'ratio':>8}   range over {args.blocks} blocks")
    for variant in variants:
        found = ratios(variant, baseline, args.rounds)
        milliseconds = 1e3 * statistics.median(variant.seconds)
        print(
            f"{variant.name:<42}{milliseconds:>10.1f}{statistics.median(found):>8.3f}"
            f"   {min(found):.3f} to {max(found):.3f}"
        )


if __name__ == "__main__":
    main()
