"""What a call site costs: nanoseconds outside of a scope, microseconds inside, eager and compiled.

Calls of all variants are interleaved in blocks, so that whatever else the machine does falls on all alike. The table
shows the median over blocks, and the fastest block. Outside of a scope a call is compared with a call of an empty
function of the same signature, which is what Python itself costs. Compiled variants are whole forwards of a small model
with and without a call site in each of its layers; their difference is divided by the number of layers.

    python benchmarks/bench_callsite.py [--blocks 9] [--calls 20000] [--backend inductor]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import telemetry
from machine import describe_machine

NEVER = 10**9


def empty(
    owner: object,
    name: str,
    source_kind: str,
    tensor: Tensor,
    *,
    tp_shard_dim: int | None = None,
    sequence_dim: int | None = None,
    batch_dim: int | None = None,
) -> None:
    """Do nothing with the arguments of a call site."""


class Layer(nn.Module):
    """A layer that may show its output."""

    def __init__(self, width: int, *, shows: bool) -> None:
        super().__init__()
        self.linear, self.shows = nn.Linear(width, width), shows

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, and show it if that is asked for."""
        y = torch.relu(self.linear(x))
        if self.shows:
            telemetry.observe_tensor(self, "output", "shown", y, sequence_dim=0, batch_dim=1)
        return y


def seconds_each(run: Callable[[], object], count: int) -> float:
    """Return the mean duration of ``count`` runs."""
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count


def measure(variants: dict[str, Callable[[], object]], blocks: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of a run, by variant and block; a first block is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(blocks + 1):
        for name, run in variants.items():
            found[name].append(seconds_each(run, count))
    return {name: seconds[1:] for name, seconds in found.items()}


def show(name: str, seconds: list[float], unit: str) -> None:
    """Print one row."""
    factor = {"ns": 1e9, "µs": 1e6}[unit]
    print(f"{name:<58}{factor * statistics.median(seconds):>9.1f}{factor * min(seconds):>9.1f} {unit}")


def bare_calls(args: argparse.Namespace, root: Path) -> None:
    """Measure single calls."""
    model = nn.ModuleDict({"layer": nn.Linear(4, 4)})
    owner = model["layer"]
    small, large = torch.randn(4, 4, 1), torch.randn(64, 8, 256)

    def call(function: Callable[..., None], tensor: Tensor) -> Callable[[], None]:
        return lambda: function(owner, "output", "shown", tensor, sequence_dim=0, batch_dim=1)

    variants = {
        "an empty function of the same signature": call(empty, small),
        "observe_tensor outside of a scope": call(telemetry.observe_tensor, small),
    }
    for name, seconds in measure(variants, args.blocks, args.calls).items():
        show(name, seconds, "ns")
    with telemetry.watch(model, to=root / "idle", signals=(), call_sites=("shown",), every=NEVER) as session:
        with session.step(1):
            pass
        with session.step(2):
            found = measure(
                {"in a step that is not due": variants["observe_tensor outside of a scope"]}, args.blocks, args.calls
            )
    show("observe_tensor in a step that is not due", found["in a step that is not due"], "ns")
    variants = {
        "observe_tensor in a due step, 16 elements": call(telemetry.observe_tensor, small),
        f"observe_tensor in a due step, {large.numel():,} elements": call(telemetry.observe_tensor, large),
    }
    options = {"signals": (), "call_sites": ("shown",), "every": 1, "hist_every": None}
    with telemetry.watch(model, to=root / "due", **options) as session, session.step(1):
        for name, seconds in measure(variants, args.blocks, max(1, args.calls // 1000)).items():
            show(name, seconds, "µs")


def forwards(args: argparse.Namespace, root: Path) -> None:
    """Measure forwards of a model with and without call sites, eager and compiled, off cadence and on it."""
    torch._dynamo.reset()
    for compiled in (False, True):
        for due in (False, True):
            variants: dict[str, Callable[[], object]] = {}
            x = torch.randn(16, 4, args.width)
            models = {
                shows: nn.Sequential(*(Layer(args.width, shows=shows) for _ in range(args.layers)))
                for shows in (False, True)
            }
            options = {"signals": (), "call_sites": ("shown",), "every": 1 if due else NEVER, "hist_every": None}
            folder = root / f"{compiled}-{due}"
            with telemetry.watch(models[True], to=folder, **options) as session:
                for shows, model in models.items():
                    called = torch.compile(_Whole(model), fullgraph=True, backend=args.backend) if compiled else model
                    variants["with" if shows else "without"] = _forward_of(called, x)
                if not due:
                    with session.step(1):
                        variants["with"]()
                with session.step(2):
                    found = measure(variants, args.blocks, 50)
            each = [(a - b) / args.layers for a, b in zip(found["with"], found["without"], strict=True)]
            way = f"{'compiled' if compiled else 'eager'}, {'due' if due else 'not due'}"
            show(f"a call site of {x.numel():,} elements in a forward, {way}", each, "µs")


class _Whole(nn.Module):
    """Gives the compiler a frame that is not torch's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _forward_of(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def forward() -> Tensor:
        with torch.no_grad():
            return model(x)

    return forward


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(describe_machine())
    print(f"\n{'':<58}{'median':>9}{'fastest':>9}")
    with tempfile.TemporaryDirectory() as root:
        bare_calls(args, Path(root))
        forwards(args, Path(root))


if __name__ == "__main__":
    main()
