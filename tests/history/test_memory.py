"""Steps in memory are bounded, and what gives way is what the caller chose."""

import numpy as np
import pytest
import torch

from aggregator.history.memory import RecentSteps
from aggregator.testing.packets import make_packet, make_site, make_step
from telemetry.errors import ConfigurationError, HistoryFullError
from telemetry.summary import INT_FIELDS, summarize

A, B = make_site("a"), make_site("b")


def values(step):
    return torch.arange(4.0) + step


def step_of(step, histogram=True):
    observed = {A: summarize(values(step), histogram=histogram)}
    if step % 3 == 0:
        observed[B] = summarize(values(step) * 2)
    return make_step(make_packet(step, observed))


def filled(policy, count, capacity=4):
    recent = RecentSteps(capacity, policy)
    for step in range(count):
        recent.add(step_of(step))
    return recent


def spans(recent):
    return [(span.step_lo, span.step_hi) for span in recent]


def test_refuse_says_before_the_next_due_step_what_can_be_done(tmp_path):
    recent = filled("refuse", 4)
    with pytest.raises(HistoryFullError, match=r"4 steps are in memory(.|\n)*give a directory(.|\n)*drop_oldest"):
        recent.require_room(4)
    with pytest.raises(HistoryFullError):
        recent.add(step_of(4))
    assert spans(recent) == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("policy", ["drop_oldest", "archived"])
def test_the_oldest_give_way_and_are_counted(policy):
    recent = filled(policy, 10)
    recent.require_room(10)
    assert spans(recent) == [(6, 6), (7, 7), (8, 8), (9, 9)]
    assert recent.num_dropped == 6


def test_coarsening_keeps_every_step_in_bounded_memory_with_exact_counts():
    recent = filled("coarsen", 257)
    assert len(recent) <= 4
    assert recent.num_dropped == 0
    covered = [step for low, high in spans(recent) for step in range(low, high + 1)]
    assert covered == list(range(257))
    assert sum(span.num_steps for span in recent) == 257
    for span in recent:
        steps = range(span.step_lo, span.step_hi + 1)
        whole = summarize(torch.cat([values(step) for step in steps]), histogram=True)
        row = int(np.searchsorted(span.sites, np.uint64(A.site_id)))
        assert dict(zip(INT_FIELDS, span.ints[row].tolist(), strict=True)) == {
            **{name: getattr(whole, name) for name in INT_FIELDS},
            "calls": len(steps),
        }
        assert span.hist_counts[0].tolist() == whole.histogram.counts.tolist()
        assert span.floats[row, 3] == pytest.approx(whole.sum, rel=1e-12)
        assert span.floats[row, 7] == pytest.approx(whole.m2, rel=1e-9, abs=1e-9)


def test_a_policy_that_is_none_is_refused():
    for arguments in ((4, "forget"), (1, "refuse")):
        with pytest.raises(ConfigurationError):
            RecentSteps(*arguments)
