"""What a cast to a narrower format would lose is counted exactly, and agrees with the cast itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from telemetry.errors import ConfigurationError, DtypeUnsupportedError
from telemetry.summary import TARGETS, summarize
from telemetry.summary.quantization import QuantizationLoss
from telemetry.summary.reference import _magnitudes, reference_quantization
from tests.summary.summary_oracle import elements, every_pattern


def assert_loss_equal(lost: QuantizationLoss, values: np.ndarray) -> None:
    words = reference_quantization(values, TARGETS[lost.target])
    assert [lost.underflow, lost.overflow, lost.saturated] == words[:3].tolist()
    assert lost.sum_sq_error == pytest.approx(float(words.view(np.float64)[3]), rel=1e-11, abs=0)
    assert lost.finite == np.isfinite(values).sum()


def around_every_value(name: str) -> torch.Tensor:
    """Every value of the format, every middle between two, and their float64 neighbours; both signs."""
    grid = _magnitudes(TARGETS[name])
    points = np.concatenate((grid, (grid[1:] + grid[:-1]) / 2, [grid[-1] * 2, 1e300, 5e-324]))
    near = np.concatenate((points, np.nextafter(points, 0), np.nextafter(points, np.inf)))
    return torch.from_numpy(np.concatenate((near, -near, [np.nan, np.inf, -np.inf])))


@pytest.mark.parametrize("name", TARGETS)
def test_every_value_middle_and_neighbour_rounds_as_in_the_oracle(backend, name):
    tensor = around_every_value(name)
    tensor = tensor[torch.isfinite(tensor) & (tensor.abs() < 1e100)]
    assert_loss_equal(summarize(tensor, target=name).quantization, elements(tensor))


@pytest.mark.parametrize("name", TARGETS)
def test_counts_hold_for_values_whose_squared_error_overflows(backend, name):
    tensor = around_every_value(name)
    lost = summarize(tensor, target=name).quantization
    assert [lost.underflow, lost.overflow, lost.saturated] == reference_quantization(elements(tensor), TARGETS[name])[
        :3
    ].tolist()
    assert lost.sum_sq_error == np.inf


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_pattern_is_cast_as_in_the_oracle(backend, name, dtype):
    tensor = every_pattern(dtype)
    assert_loss_equal(summarize(tensor, target=name).quantization, elements(tensor))


@pytest.mark.parametrize("name", TARGETS)
def test_the_error_is_that_of_torch_itself_inside_of_the_range(backend, name):
    generator = torch.Generator().manual_seed(9)
    tensor = torch.randn(20_000, generator=generator).clamp(-4, 4) * torch.logspace(-9, 2, 20_000)
    cast = tensor.to(getattr(torch, name)).to(torch.float64)
    lost = summarize(tensor, target=name).quantization
    assert lost.sum_sq_error == pytest.approx(((tensor.double() - cast) ** 2).sum().item(), rel=1e-12)
    assert lost.underflow == ((cast == 0) & (tensor != 0)).sum().item()


def test_a_format_loses_nothing_of_its_own_values(backend):
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        lost = summarize(every_pattern(getattr(torch, name)), target=name).quantization
        assert (lost.underflow, lost.overflow, lost.sum_sq_error) == (0, 0, 0.0), name
        assert lost.saturated == 2, name


def test_underflow_overflow_and_saturation_are_told_apart(backend):
    tensor = torch.tensor([0.0, 1e-6, 1.0, 448.0, 460.0, 470.0, -1e9, np.inf])
    lost = summarize(tensor, target=torch.float8_e4m3fn).quantization
    assert (lost.finite, lost.underflow, lost.saturated, lost.overflow) == (7, 1, 4, 2)
    assert lost.mean_sq_error == pytest.approx(((460 - 448) ** 2 + 22**2 + (1e9 - 448) ** 2 + 1e-12) / 7)


def test_losses_merge_like_the_counts_they_are(backend):
    tensor = torch.randn(9999, generator=torch.Generator().manual_seed(3)) * 200
    whole = summarize(tensor, target="float8_e4m3fn")
    parts = [summarize(part, target="float8_e4m3fn") for part in tensor.chunk(3)]
    merged = parts[0].merge(parts[1]).merge(parts[2]).quantization
    assert merged.saturated == whole.quantization.saturated
    assert merged.underflow == whole.quantization.underflow
    assert merged.overflow == whole.quantization.overflow
    assert merged.mean_sq_error == pytest.approx(whole.quantization.mean_sq_error, rel=1e-12)


def test_losses_of_two_targets_refuse_to_merge_and_an_unknown_target_is_refused():
    a, b = (summarize(torch.ones(3), target=name) for name in ("float16", "bfloat16"))
    with pytest.raises(ConfigurationError, match=r"float16.*bfloat16"):
        a.merge(b)
    with pytest.raises(ConfigurationError, match="the other has none"):
        a.merge(summarize(torch.ones(3)))
    with pytest.raises(DtypeUnsupportedError, match=r"float32.*float8_e4m3fn"):
        summarize(torch.ones(3), target=torch.float32)


def test_nothing_finite_has_no_mean_error():
    lost = summarize(torch.tensor([np.nan]), target="float16").quantization
    assert np.isnan(lost.mean_sq_error)
