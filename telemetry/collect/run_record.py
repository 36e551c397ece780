"""What a run says of itself: versions, model, layout and cadence, stored once by whoever writes the record."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from telemetry.collect.names import ModelNames, unwrapped
from telemetry.collect.preparation import Preparation, Request
from telemetry.summary.aten import REDUCTION_DTYPE
from telemetry.version import VERSION

__all__ = ["run_record"]


def run_record(request: Request, prepared: Preparation) -> dict[str, Any]:
    """Return the run record of this rank, JSON-serialisable; rank zero's is stored."""
    models = [unwrapped(chunk) for chunk in request.chunks]
    is_wrapped = request.chunks[0] is not models[0]
    return {
        "rankfold": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hostname": platform.node(),
        "script": sys.argv[0],
        "name": request.name,
        "model": type(models[0]).__name__,
        "num_model_chunks": len(models),
        "model_fingerprint": _fingerprint(models),
        "wrapped_in": type(request.chunks[0]).__name__ if is_wrapped else None,
        "world_size": request.world_size,
        "layout": prepared.layout.to_wire(),
        "every": dict(prepared.schedule.every),
        "hist_every": request.hist_every,
        "last_step": request.last_step,
        "due_offset": request.due_offset,
        "selection": str(prepared.selection),
        "full_updates": request.full_updates,
        "budget_ms": request.budget_ms,
        "settings": {
            setting.name: {"value": setting.words, "origin": setting.origin} for setting in request.settings.changed
        },
        "reduction_dtype": REDUCTION_DTYPE,
        "backend": prepared.backend,
        "gradient_convention": "gradients and activation gradients are those of each rank's own loss, as the loop "
        "scaled it; parameter gradients are read after the reduction over replicas",
    }


def _fingerprint(models: Sequence[nn.Module]) -> str:
    """Hash names, shapes and dtypes of the parameters: what has to be alike for two runs to be comparable."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter, *_ in ModelNames(models).parameters():
        shape = "lazy" if isinstance(parameter, nn.parameter.UninitializedParameter) else list(parameter.shape)
        digest.update(f"{name} {parameter.dtype} {shape}\n".encode())
    return digest.hexdigest()
