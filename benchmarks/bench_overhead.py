"""What observing costs a training step: interleaved ratios of observed to unobserved step time.

Every variant trains its own copy of one model on the same batches. A block is a turn of every variant, in an order
drawn anew; a turn is several steps of one variant in a row, so that what its merge and its history still do in the
background falls on its own next steps, as it does in a run. Each block gives one ratio, the sum of a variant's steps
over the sum of the unobserved ones; the table shows the median over blocks and their range. The last column is the same
ratio of processor time of the training thread, which other load on the machine moves less. Observers of other projects
take part where they are installed: pip install wandb torchlens torchinstruments.

    python benchmarks/bench_overhead.py [--blocks 5] [--steps 4] [--intervals]
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import telemetry

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch" / "demo"))
from demo_model import ByteGPT, GPTConfig
from machine import describe_machine
from observers import OTHERS, Scope

NEVER = 10**9
WEIGHTS = ("parameters", "gradients", "updates")
# name → (arguments of watch, target of the ratio)
OURS: dict[str, tuple[dict[str, Any], float | None]] = {
    "attached, no step due": ({"every": NEVER, "hist_every": None}, 1.01),
    "every=1, parameters, gradients, updates": ({"every": 1, "hist_every": None, "signals": WEIGHTS}, 1.05),
    "every=1, all five signals": ({"every": 1, "hist_every": None}, 1.15),
    "every=1, all five with histograms": ({"every": 1, "hist_every": 1}, 1.30),
}
# Meant for small models: an interval shows only in turns that are longer than it.
INTERVALS: dict[str, tuple[dict[str, Any], float | None]] = {
    "every=50, all five signals": ({"every": 50, "hist_every": None}, None),
    "every=10, all five signals": ({"every": 10, "hist_every": None}, None),
}

Attach = Callable[[nn.Module, Optimizer, Path], AbstractContextManager[Scope]]


@dataclass
class Variant:
    """One way to train, and the durations of its steps in seconds."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    scope: Scope
    target: float | None
    records: str
    seconds: list[float] = field(default_factory=list)
    thread_seconds: list[float] = field(default_factory=list)

    def train_step(self, step: int, batch: Tensor) -> None:
        """Train one step and keep its duration."""
        started, thread_started = time.perf_counter(), time.thread_time()
        with self.scope(step):
            logits = self.model(batch[:, :-1])
            self.optimizer.zero_grad()
            cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.thread_seconds.append(time.thread_time() - thread_started)

    def forget_last(self) -> None:
        """Leave the last step out."""
        self.seconds.pop()
        self.thread_seconds.pop()


def watched(options: dict[str, Any]) -> Attach:
    """Return what attaches a session of ours."""

    @contextmanager
    def attach(model: nn.Module, optimizer: Optimizer, folder: Path) -> Iterator[Scope]:
        with telemetry.watch(model, optimizer=optimizer, to=folder, **options) as session:
            yield session.step

    return attach


@contextmanager
def unobserved(model: nn.Module, optimizer: Optimizer, folder: Path) -> Iterator[Scope]:
    """Attach nothing."""
    yield lambda step: nullcontext()


def make_variants(original: nn.Module, root: Path, stack: ExitStack, args: argparse.Namespace) -> list[Variant]:
    """Make every variant with a folder of its own, the unobserved one first."""
    ours = {**OURS, **(INTERVALS if args.intervals else {})}
    wanted: list[tuple[str, Attach, float | None, str]] = [("unobserved", unobserved, None, "")]
    wanted += [(name, watched(options), target, "") for name, (options, target) in ours.items()]
    for name, other in OTHERS.items():
        if other.is_installed and not args.ours_alone:
            wanted.append((name, other.attach, None, f"{other.package} {version(other.package)}: {other.records}"))
    variants = []
    for index, (name, attach, target, records) in enumerate(wanted):
        model = copy.deepcopy(original)
        optimizer = torch.optim.AdamW(model.parameters())
        scope = stack.enter_context(attach(model, optimizer, root / str(index)))
        variants.append(Variant(name, model, optimizer, scope, target, records))
    return variants


def measure(variants: list[Variant], config: GPTConfig, args: argparse.Namespace) -> None:
    """Run all blocks; before them comes one step of each variant, the first, which is always logged."""
    batches = torch.randint(256, (args.steps, args.batch, config.context + 1))
    for variant in variants:
        variant.train_step(1, batches[0])
        variant.forget_last()
    order = random.Random(0)
    for block in range(args.blocks):
        for variant in order.sample(variants, len(variants)):
            # One step that is not timed takes the caches over from the variant before.
            variant.train_step(2 + block * (args.steps + 1), batches[0])
            variant.forget_last()
            for index in range(args.steps):
                variant.train_step(3 + block * (args.steps + 1) + index, batches[index])
        print(f"  block {block + 1} of {args.blocks}", file=sys.stderr, flush=True)


def ratios(seconds: list[float], baseline: list[float], steps: int) -> list[float]:
    """Return one ratio for each block of ``steps`` steps."""
    starts = range(0, len(seconds), steps)
    return [sum(seconds[i : i + steps]) / sum(baseline[i : i + steps]) for i in starts]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--intervals", action="store_true", help="also every=10 and every=50")
    parser.add_argument("--ours-alone", action="store_true", help="leave out what other projects have")
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
        variants = make_variants(model, Path(root), stack, args)
        measure(variants, config, args)
    baseline = variants[0]
    print(f"\n{'variant':<42}{'ms a step':>10}{'ratio':>8}{'target':>8}   range over {args.blocks} blocks   thread")
    for variant in variants:
        found = ratios(variant.seconds, baseline.seconds, args.steps)
        of_thread = statistics.median(ratios(variant.thread_seconds, baseline.thread_seconds, args.steps))
        milliseconds = 1e3 * statistics.median(variant.seconds)
        target = "" if variant.target is None else f"{variant.target:.2f}"
        print(
            f"{variant.name:<42}{milliseconds:>10.1f}{statistics.median(found):>8.3f}{target:>8}"
            f"   {min(found):.3f} to {max(found):.3f}     {of_thread:>8.3f}"
        )
    for variant in variants:
        if variant.records:
            print(f"{variant.name}: {variant.records}")


if __name__ == "__main__":
    main()
