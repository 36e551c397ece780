"""The gate of a killed actor counts by itself, and finds a packet that was lost or counted twice."""

import pytest
import torch

from aggregator.catalogue import Catalogue
from aggregator.history import HistoryWriter
from aggregator.testing.packets import make_packet, make_site, make_step
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize
from tests.gates.sabotage import gate_named, rehearsed, sabotaged

GATE = gate_named("ray-failover").run.__globals__
COUNTS_DIFFER = "counts that differ from those of the ranks"
SITE, RANKS, STEPS = make_site("0"), 3, range(1, 6)


def fed(step):
    return [GATE["batch_of"](rank, step) for rank in range(RANKS)]


def expected():
    """The counts of all ranks, a row a step, as ranks count them."""
    return [[sum(one) for one in zip(*map(GATE["counts_of"], fed(step)), strict=True)] for step in STEPS]


def compared(path, steps):
    """What the gate finds in a record of ``steps``: step → batches that were counted."""
    writer, catalogue = HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR), Catalogue()
    for step, batches in steps.items():
        summaries = [summarize(batch, histogram=True) for batch in batches]
        merged = summaries[0]
        for summary in summaries[1:]:
            merged = merged.merge(summary)
        writer.commit(make_step(make_packet(step, {SITE: merged}), catalogue))
    writer.close()
    found = GATE["compare"](path, expected(), len(STEPS))
    return [found[name] for name in ("acknowledged steps that are not in the record once", COUNTS_DIFFER)]


def test_the_sums_over_ranks_are_what_one_record_of_all_batches_has(tmp_path):
    assert compared(tmp_path, {step: fed(step) for step in STEPS}) == [0, 0]
    every = torch.cat([batch.flatten() for step in STEPS for batch in fed(step)])
    # Every count is tried: none of them is zero by nature.
    assert all(sum(counts) > 0 for counts in zip(*expected(), strict=True))
    assert every.isnan().any()


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ({step: fed(step) for step in STEPS if step != 3}, [1, 0]),
        ({step: fed(step)[: 2 if step == 3 else 3] for step in STEPS}, [0, 1]),
        ({step: fed(step) + fed(step)[: 1 if step == 3 else 0] for step in STEPS}, [0, 1]),
    ],
    ids=["a step is lost", "a packet is lost", "a packet counts twice"],
)
def test_what_is_lost_or_counted_twice_is_found(tmp_path, steps, found):
    assert compared(tmp_path, steps) == found


@pytest.mark.full
@pytest.mark.timeout(400)
def test_as_a_job_it_fails_where_a_rank_feeds_something_else_than_it_counts(tmp_path):
    found = sabotaged(
        "ray-failover", tmp_path, "                model(batch)\n", "                model(batch[:, 1:])\n"
    )
    verdict, reason = rehearsed(found, tmp_path)
    assert (verdict, reason.startswith("counts that differ from those of the ranks is ")) == ("failed", True), reason
