"""A thousand random fault schedules on the protocol itself: never a hang, never a wrong count, always a coverage."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.collective.schedules import Schedule, check_outcome
from tests.collective.simulation import SimulatedWorld

NUM_SCHEDULES = 1000
NUM_BATCHES = 4
KINDS = ("calm", "partial step", "full step", "refused", "conflict in a step", "dead")


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_no_schedule_of_faults_hangs_miscounts_or_leaves_a_step_without_a_coverage(batch):
    seen: Counter[str] = Counter()
    for seed in range(batch, NUM_SCHEDULES, NUM_BATCHES):
        schedule = Schedule(seed)
        try:
            world = schedule.run()
            check_outcome(schedule, world)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {'; '.join(schedule.faults) or 'no fault'}") from error
        seen.update(_kinds(schedule, world))
    # A schedule that cannot fail shows nothing: all of these must have happened, and often.
    assert all(
        seen[kind] >= 5 for kind in ("calm", "partial step", "refused", "conflict in a step", "dead", "full step")
    )


def test_a_schedule_is_what_its_seed_says():
    first, second = Schedule(77), Schedule(77)
    one, two = first.run(), second.run()
    assert first == second
    assert [rank.ended_at for rank in one.ranks] == [rank.ended_at for rank in two.ranks]
    assert [s.packet.to_bytes() for s in one.ranks[0].recorder.steps] == [
        s.packet.to_bytes() for s in two.ranks[0].recorder.steps
    ]


def _kinds(schedule: Schedule, world: SimulatedWorld) -> set[str]:
    steps = world.ranks[0].recorder.steps
    is_partial = [set(step.missing) != set(step.packet.abstained) for step in steps]
    happened = {
        "calm": schedule.is_calm,
        "partial step": any(is_partial),
        "full step": not all(is_partial),
        "refused": any(rank.refusal for rank in world.ranks),
        "conflict in a step": any(f["code"] == "catalogue_conflict" for s in steps for f in s.packet.findings),
        "dead": any(rank.is_dead for rank in world.ranks),
    }
    return {kind for kind, has_happened in happened.items() if has_happened}
