"""Run a test on every backend that works here."""

from collections.abc import Iterator

import pytest
import torch

from telemetry.summary import available_backends, using_backend


@pytest.fixture(params=available_backends())
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_backend(request.param):
        yield request.param


@pytest.fixture
def flushed_denormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
