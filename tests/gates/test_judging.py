"""What was measured against the limits: nothing that is missing, not a number or out of bounds passes."""

import math

import pytest

from launch.gates import Gate, Limit, Needs
from launch.gates.verdict import judge


def gate(**limit):
    bounds = Limit("ratio", **{"comparison": "at most", "bound": 1.0, **limit})
    return Gate("g", "p", "do", Needs(), (bounds, Limit("findings", "equal to", 0)), "r")


@pytest.mark.parametrize(
    ("comparison", "value", "holds"),
    [
        ("at most", 1.0, True),
        ("at most", 1.1, False),
        ("at least", 1.0, True),
        ("at least", 0.9, False),
        ("equal to", 1.0, True),
        ("equal to", 1.0001, False),
        ("at most", math.nan, False),
        ("at least", math.nan, False),
        ("equal to", math.nan, False),
    ],
)
def test_a_limit_holds_on_its_own_side_and_never_for_nan(comparison, value, holds):
    state, reason, _ = judge(gate(comparison=comparison), {"ratio": value, "findings": 0}, is_rehearsal=False)
    assert state == ("passed" if holds else "failed")
    assert ("ratio is" in reason) is not holds


@pytest.mark.parametrize("measured", [{}, {"ratio": 1.0}, {"findings": 0}])
def test_a_quantity_that_was_not_measured_fails_by_name(measured):
    state, reason, _ = judge(gate(), measured, is_rehearsal=False)
    assert state == "failed"
    for name in {"ratio", "findings"} - measured.keys():
        assert f"{name} is not measured" in reason


def test_a_limit_for_gpus_is_measured_and_not_judged_in_a_rehearsal():
    limited = gate(on_gpu_only=True)
    measured = {"ratio": 7.0, "findings": 0}
    state, _, rows = judge(limited, measured, is_rehearsal=True)
    assert (state, rows[0].value, rows[0].holds, rows[0].is_judged) == ("passed", 7.0, False, False)
    assert judge(limited, measured, is_rehearsal=False)[0] == "failed"
    assert judge(limited, {"ratio": 1.0, "findings": 1}, is_rehearsal=True)[0] == "failed"
