"""Moments hold where one-pass formulas fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from telemetry.summary import summarize
from tests.summary.summary_oracle import assert_floats_close, elements

SIZE = 50_000


def noise(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def ulp_apart(value: float, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.full((SIZE,), value, dtype=dtype)
    tensor[::3] = torch.nextafter(tensor[0], torch.tensor(torch.inf, dtype=dtype))
    return tensor


HARD = {
    "mean a million times the spread, float32": (1e6 + noise()).to(torch.float32),
    "mean a million times the spread, float64": 1e6 + noise(),
    "a constant but for one ulp, float32": ulp_apart(0.1, torch.float32),
    "a constant but for one ulp, float64": ulp_apart(0.1, torch.float64),
    "around 1e30": (noise() * 1e30).to(torch.float32),
    "around 1e-30": (noise() * 1e-30).to(torch.float32),
    "mean and spread at 1e30": (1e30 * (1 + 1e-3 * noise())).to(torch.float32),
    "skewed": noise().exp().to(torch.float32),
    "heavy tails": (noise() ** 7).to(torch.float32),
    "one outlier": torch.cat((noise(torch.float32), torch.tensor([1e20]))),
    "two levels, far apart and in order": torch.cat((noise() + 1e6, noise() - 1e6)).to(torch.float32),
    "a first block far from all others": torch.cat((1e6 + noise()[:1024], noise())).to(torch.float32),
    "a first element far from all others": torch.cat((torch.tensor([1e6, *[torch.nan] * 1023]), noise(torch.float32))),
    "half types": noise(torch.bfloat16),
    "near the float32 maximum": torch.tensor([3.4e38, -3.4e38, 3.3e38] * 999),
    "float32 subnormals": torch.arange(1, 5000, dtype=torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("case", HARD)
def test_moments_are_those_of_the_oracle_in_hard_cases(backend, case):
    tensor = HARD[case]
    assert_floats_close(summarize(tensor), elements(tensor))


@pytest.mark.parametrize("value", [0.1, 1e-30, 1e30, -7.0])
def test_a_constant_has_no_spread_to_speak_of(backend, value):
    tensor = torch.full((SIZE,), value)
    summary = summarize(tensor)
    assert 0 <= summary.m2 <= SIZE * (value * 1e-15) ** 2
    assert summary.mean == pytest.approx(float(tensor[0]), rel=1e-15)


def test_a_sum_of_float64_that_overflows_is_infinite_and_spoils_no_count(backend):
    summary = summarize(torch.tensor([1e308, 1e308, -1.0], dtype=torch.float64))
    assert summary.sum == np.inf
    assert (summary.finite, summary.negative, summary.max) == (3, 1, 1e308)


def test_the_identity_of_merge_stays_one_after_an_overflow(backend):
    summary = summarize(torch.tensor([1e200, -1e200], dtype=torch.float64))
    assert not np.isfinite(summary.m4)
    assert type(summary).empty().merge(summary) == summary == summary.merge(type(summary).empty())
