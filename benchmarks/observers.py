"""Observers of other projects, each as its users would attach it, for comparison on one workload.

What they record differs, so each says it in words. All of them observe every step.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["OTHERS", "OtherObserver"]

Scope = Callable[[int], AbstractContextManager[Any]]


@dataclass(frozen=True)
class OtherObserver:
    """One observer.

    Attributes:
        package: what has to be installed; version is that of its distribution.
        records: what it keeps of a step.
        attach: (model, optimizer, folder) → context in which the model is observed; gives the scope of a step.
    """

    package: str
    records: str
    attach: Callable[[nn.Module, Optimizer, Path], AbstractContextManager[Scope]]

    @property
    def is_installed(self) -> bool:
        """Whether the package is there, without importing it."""
        return importlib.util.find_spec(self.package) is not None


@contextmanager
def _wandb_watch(model: nn.Module, optimizer: Optimizer, folder: Path) -> Iterator[Scope]:
    import wandb

    folder.mkdir(parents=True)
    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(project="bench", dir=str(folder), mode="offline")
    # A call between two steps of a log sends what the hooks have put into it.
    run.watch(model, log="all", log_freq=1)

    @contextmanager
    def scope(step: int) -> Iterator[None]:
        yield
        run.log({"step": step})

    yield scope
    run.unwatch(model)
    run.finish()


def _torchlens(hist_every: int | None) -> Callable[[nn.Module, Optimizer, Path], AbstractContextManager[Scope]]:
    @contextmanager
    def attach(model: nn.Module, optimizer: Optimizer, folder: Path) -> Iterator[Scope]:
        from torchlens.trackers import JSONLSink, watch

        folder.mkdir(parents=True)
        session = watch(
            model,
            to=JSONLSink(str(folder / "record.jsonl")),
            signals=("gradients", "parameters", "updates"),
            optimizer=optimizer,
            every=1,
            hist_every=hist_every,
        )
        yield session.step
        session.close()

    return attach


@contextmanager
def _torchinstruments(model: nn.Module, optimizer: Optimizer, folder: Path) -> Iterator[Scope]:
    from torchinstruments import AlwaysSampler, inject_observer, remove_observer

    inject_observer(model, sampler=AlwaysSampler(), output_dir=folder)
    yield lambda step: nullcontext()
    remove_observer(model)


OTHERS = {
    "wandb.watch(log='all', log_freq=1)": OtherObserver(
        "wandb", "64-bin histograms of parameters and gradients", _wandb_watch
    ),
    "torchlens watch(every=1)": OtherObserver(
        "torchlens", "scalars of gradients, parameters, updates", _torchlens(None)
    ),
    "torchlens watch(every=1, hist_every=1)": OtherObserver("torchlens", "the same with histograms", _torchlens(1)),
    "torchinstruments, every forward": OtherObserver(
        "torchinstruments", "scalars and histograms of activations and their gradients", _torchinstruments
    ),
}
