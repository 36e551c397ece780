"""What a report of a large run costs: seconds and memory to write it, megabytes, seconds to open it.

The run has 500 sites (100 parts of a model, five kinds each) × 2,000 steps, with a histogram every 100 steps. Every
number of every row differs from its neighbours, so that nothing compresses better than a real run would.

    python benchmarks/bench_report.py runs/large

A run that is already there is reported as it is, for instance that of ``rankfold demo``. Where Chromium is installed,
it opens the page five times: once as a browser that has just been started, then warm.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from aggregator.catalogue import Catalogue
from aggregator.history import HistoryWriter, open_history
from aggregator.report import write_report
from aggregator.testing import make_packet, make_site, make_step
from machine import describe_machine
from telemetry.packet import Packet, StepFacts
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize
from telemetry.summary.fields import FLOAT_FIELDS

KINDS = ("activation", "activation_grad", "parameter", "gradient", "update")
HIST_EVERY = 100
# By which power of a factor on the elements each float of a summary grows.
POWERS = {"sum_sq": 2, "m2": 2, "m3": 3, "m4": 4}


def packets(num_parts: int, num_steps: int, seed: int = 0) -> Iterator[Packet]:
    """Yield one packet a step, its numbers scaled by a factor of each site's own."""
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    names = [
        f"decoder.layers.{part // 4}.{('attention.qkv', 'attention.proj', 'mlp.up', 'mlp.down')[part % 4]}"
        for part in range(num_parts)
    ]
    shapes = {"shape": (64, 64), "numel": 4096}
    sites = [make_site(name, kind, **shapes) for kind in KINDS for name in names]
    tensors = [torch.randn(4096) * 10 ** draw.uniform(-4, 1) for _ in sites]
    facts = StepFacts(num_applied=8, num_micro_batches=1, step_s=0.5, self_s=0.004, read_bytes=2**30)
    with_histogram = make_packet(
        0, {s: summarize(t, histogram=DEFAULT_DESCRIPTOR) for s, t in zip(sites, tensors, strict=True)}, facts=facts
    )
    plain = make_packet(0, {s: summarize(t) for s, t in zip(sites, tensors, strict=True)}, facts=facts)
    powers = np.array([POWERS.get(name, 1) for name in FLOAT_FIELDS])
    walk = np.zeros(len(sites))
    for step in range(num_steps):
        walk += draw.normal(0, 0.02, len(sites))
        factor = np.exp(walk + draw.normal(0, 0.1, len(sites)))
        chosen = with_histogram if step % HIST_EVERY == 0 else plain
        yield replace(
            chosen,
            step=step,
            floats=chosen.floats * factor[:, None] ** powers,
            facts=replace(facts, self_s=float(draw.uniform(0.003, 0.006))),
        )


def write_run(path: Path, num_parts: int, num_steps: int) -> None:
    """Write the run, unless it is there."""
    if path.exists():
        return
    run = {"model": "Decoder", "world_size": 1, "every": dict.fromkeys(KINDS, 1), "hist_every": HIST_EVERY}
    writer = HistoryWriter.create(path, run, DEFAULT_DESCRIPTOR)
    catalogue = Catalogue()
    for packet in packets(num_parts, num_steps):
        writer.append(make_step(packet, catalogue))
    writer.close()


def print_openings(page: Path, num_openings: int = 5) -> None:
    """Print for each opening when the text could be read, the first chart answered, and all charts were drawn."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.report.browser import CHROMIUM, Browser

    if CHROMIUM is None:
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        try:
            for opening in range(num_openings):
                drawn_s = browser.open(page)
                text_ms = browser.value("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
                first_ms = float(browser.value("document.documentElement.dataset.first || 'nan'"))
                told = f"text {text_ms / 1e3:.2f} s, first chart {first_ms / 1e3:.2f} s, all charts {drawn_s:.2f} s"
                print(f"opening {opening + 1} ({'warm' if opening else 'new browser'}): {told}")
        finally:
            browser.close()


def main() -> None:
    """Write the run and its report, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--parts", type=int, default=100, help="sites are five times as many")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    print(describe_machine())
    write_run(arguments.run, arguments.parts, arguments.steps)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    page = write_report(arguments.run, arguments.run.with_suffix(".html"))
    seconds = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    history = open_history(arguments.run)
    print(
        f"{history.sites().num_rows} sites x {history.steps().num_rows} steps: "
        f"{page.stat().st_size / 1e6:.2f} MB in {seconds:.1f} s, "
        f"peak memory {before / 1024:.0f} MiB before, {after / 1024:.0f} MiB after"
    )
    print_openings(page)


if __name__ == "__main__":
    main()
