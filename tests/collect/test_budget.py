"""A budget leaves whole sites out, says so in their rows, and gives every site its turn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import telemetry
from telemetry.collect.book import LocalSite, SiteBook
from telemetry.collect.budget import CostBudget
from telemetry.collect.placing import PlacementRules
from telemetry.errors import ConfigurationError
from telemetry.layout import ParallelLayout
from telemetry.presence import Presence
from tests.aggregators import KeepingAggregator


def make_sites(count: int) -> list[LocalSite]:
    layout = ParallelLayout.assumed(1)
    book = SiteBook(PlacementRules(layout, None, (), reduce_partial=False), layout, 0)
    return [book.add("activation", f"layers.{i}", torch.ones(1)) for i in range(count)]


def measure(budget: CostBudget, sites: list[LocalSite], step: int, *, ms: float, fixed_ms: float = 0.0, **options):
    """Play a step in which every site that is not left out costs ``ms``; returns the names of those left out."""
    options = {"is_due": lambda _: True, "histogram": False, **options}
    left_out = budget.choose(step, **options)
    seen = [site for site in sites if site not in left_out]
    for site in seen:
        budget.charge(site, ms / 1e3)
    budget.settle((ms * len(seen) + fixed_ms) / 1e3)
    return {site.spec.name for site in left_out}


def test_the_first_step_measures_and_the_next_keep_the_budget():
    budget, sites = CostBudget(5.0), make_sites(10)
    assert measure(budget, sites, 0, ms=1.0) == set()
    assert {len(measure(budget, sites, step, ms=1.0)) for step in range(1, 30)} <= {4, 5}


def test_what_is_not_a_site_counts_against_the_budget():
    budget, sites = CostBudget(5.0), make_sites(10)
    measure(budget, sites, 0, ms=0.99, fixed_ms=2.01)
    assert len(measure(budget, sites, 1, ms=0.99, fixed_ms=2.01)) == 7


def test_every_site_gets_its_turn():
    budget, sites = CostBudget(3.01), make_sites(10)
    measure(budget, sites, 0, ms=1.0)
    seen = [{s.spec.name for s in sites} - measure(budget, sites, step, ms=1.0) for step in range(10, 400, 10)]
    shares = [sum(site.spec.name in names for names in seen) / len(seen) for site in sites]
    assert min(shares) > 0.2


def test_ranks_leave_out_nested_parts_of_one_order():
    fast, slow, sites = CostBudget(6.5), CostBudget(6.5), make_sites(10)
    for step in range(40):
        by_fast, by_slow = measure(fast, sites, step, ms=1.0), measure(slow, sites, step, ms=2.0)
        assert by_fast <= by_slow
    assert by_fast < by_slow


def test_what_is_not_due_costs_nothing():
    budget, sites = CostBudget(2.5), make_sites(4)
    measure(budget, sites, 0, ms=1.0)
    due = sites[:2]
    assert measure(budget, due, 1, ms=1.0, is_due=lambda site: site in due) == set()


def test_a_histogram_is_expected_to_cost_more_before_it_was_measured():
    budget, sites = CostBudget(5.5), make_sites(4)
    measure(budget, sites, 0, ms=1.0)
    assert measure(budget, sites, 1, ms=1.0) == set()
    assert len(measure(budget, sites, 2, ms=1.0, histogram=True)) == 2


def test_a_site_that_was_slow_once_comes_back():
    budget, sites = CostBudget(1.5), make_sites(1)
    measure(budget, sites, 0, ms=50.0)
    left_out = [bool(measure(budget, sites, step, ms=1.0)) for step in range(1, 100)]
    assert left_out[0]
    assert not any(left_out[60:])


@pytest.mark.parametrize("budget_ms", [0, -1.0, float("inf"), float("nan"), True, "5"])
def test_what_is_no_budget_is_refused(budget_ms):
    with pytest.raises(ConfigurationError, match="budget_ms"):
        telemetry.watch(nn.Linear(1, 1), to=KeepingAggregator(), budget_ms=budget_ms)


def train(budget_ms: float | None, steps: int = 3) -> tuple[KeepingAggregator, telemetry.Session, nn.Module]:
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), KeepingAggregator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with telemetry.watch(model, to=kept, optimizer=optimizer, every=1, budget_ms=budget_ms) as session:
        for step in range(1, steps + 1):
            with session.step(step):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    return kept, session, model


def test_a_budget_that_nothing_fits_in_leaves_rows_that_say_so():
    kept, session, model = train(1e-6)
    first, *others = kept.packets
    assert set(first.presence.tolist()) == {Presence.OBSERVED}
    assert first.facts.num_budget_dropped == 0
    for packet in others:
        assert set(packet.presence.tolist()) == {Presence.BUDGET_DROPPED}
        assert packet.sites.tolist() == first.sites.tolist()
        assert (packet.facts.num_budget_dropped, packet.facts.read_bytes) == (first.num_rows, 0)
    assert kept.presence("update", "0.weight", 2) == (Presence.BUDGET_DROPPED, "left out to keep budget_ms=1e-06")
    assert session.report.observations["gradient", Presence.BUDGET_DROPPED] == 2 * 4
    assert "budget_dropped" in str(session.report)
    assert "at most 1e-06 ms" in str(session.plan)
    plain = train(None)[2]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_budget_that_all_fits_in_changes_nothing():
    kept, *_ = train(1e9)
    assert {presence for packet in kept.packets for presence in packet.presence.tolist()} == {Presence.OBSERVED}


def test_the_cost_of_a_step_is_in_its_facts():
    kept, *_ = train(None)
    weights = 4 * (4 * 4 + 4 + 4 * 1 + 1)
    outputs = 4 * (2 * 4 + 2 * 4 + 2 * 1)
    updates = 2 * weights
    facts = kept.packets[1].facts
    assert facts.read_bytes == 2 * weights + updates + 2 * outputs
    assert facts.transfer_bytes == kept.packets[1].num_rows * (18 + 1) * 8
    assert 0.0 < facts.transfer_s < facts.self_s < facts.step_s
