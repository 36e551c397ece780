"""Fault schedules, drawn from a seed: what four ranks do, what becomes of their frames, and what must be true after."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

from telemetry.errors import CatalogueConflictError
from telemetry.packet import Packet
from telemetry.presence import Presence
from telemetry.protocol import AttachOffer
from telemetry.sites import SiteSpec
from telemetry.summary.fields import TOTAL
from tests.collective.simulation import DEADLINES, Links, Plan, SimulatedRank, SimulatedWorld
from tests.collective.worlds import offer
from tests.packets import make_packet, make_site

__all__ = ["Schedule", "check_outcome"]

NUM_RANKS = 4
DISPUTED = "disputed"


@dataclass
class Schedule:
    """One drawn world; ``faults`` says in words what is wrong with it.

    Attributes:
        disputant: rank that defines a site differently, None if nobody does.
        disputes_at_attach: whether it does so in its offer, or when the site first appears in a step.
    """

    seed: int
    faults: list[str] = field(default_factory=list)
    disputant: int | None = None
    disputes_at_attach: bool = False

    def run(self) -> SimulatedWorld:
        """Draw the world and let it run."""
        random = Random(self.seed)
        hosts = [random.choice("ab") for _ in range(NUM_RANKS)]
        numbers = sorted(random.sample(range(1, 13), random.randint(1, 4)))
        if random.random() < 0.2:
            self.disputant, self.disputes_at_attach = random.randrange(NUM_RANKS), random.random() < 0.3
        plans = [self._plan(rank, numbers, random) for rank in range(NUM_RANKS)]
        self._break_ranks(plans, random)
        plans[0].records_s = random.choice((0.0, 0.0, 1.0, 20.0))
        links = self._links(random)
        world = SimulatedWorld(plans, hosts, random.choice((2, 3)), links, random)
        world.run()
        return world

    def _plan(self, rank: int, numbers: list[int], random: Random) -> Plan:
        sites = [make_site("everywhere")] if random.random() < 0.5 else []
        if self.disputes_at_attach or (rank != self.disputant and random.random() < 0.5):
            sites.append(self._definition(rank))
        known = {site.site_id for site in sites}
        steps, now = [], 0.0
        for number in numbers:
            now += random.uniform(0.0, 3.0)
            packet = _packet(rank, number, random.random() < 0.15, random.random() < 0.3)
            definitions = tuple(
                self._as_defined(site, rank) for site in packet.definitions if site.site_id not in known
            )
            known |= {site.site_id for site in definitions}
            packet = replace(packet, definitions=definitions)
            steps.append((now, packet.abstaining("over budget") if random.random() < 0.05 else packet))
        return Plan(_offer(rank, sites), random.uniform(0, 5), steps, now + random.uniform(0.0, 3.0))

    def _definition(self, rank: int) -> SiteSpec:
        return make_site(DISPUTED, dtype="bfloat16" if rank == self.disputant else "float64")

    def _as_defined(self, site: SiteSpec, rank: int) -> SiteSpec:
        return self._definition(rank) if site.name == DISPUTED else site

    def _break_ranks(self, plans: list[Plan], random: Random) -> None:
        for rank, plan in enumerate(plans):
            if random.random() < 0.12:
                plan.dies_at, plan.is_noticed = random.uniform(0, 20), random.random() < 0.7
                self.faults.append(f"rank {rank} dies at {plan.dies_at:.1f}, noticed: {plan.is_noticed}")
            if random.random() < 0.06:
                index = random.randrange(len(plan.steps))
                plan.steps[index:] = [(after_s + 60, packet) for after_s, packet in plan.steps[index:]]
                plan.closes_after_s += 60
                self.faults.append(f"rank {rank} hangs before its step {index}")
            if random.random() < 0.06:
                index = random.randrange(len(plan.steps))
                del plan.steps[index]
                self.faults.append(f"rank {rank} does not log its step {index}")
        if random.random() < 0.04:
            plans[0].fails_at = random.choice([packet.step for _, packet in plans[0].steps] or [0])
            self.faults.append(f"step {plans[0].fails_at} cannot be written")

    def _links(self, random: Random) -> Links:
        if random.random() < 0.3:
            return Links()
        links = Links(
            drop=random.choice((0.0, 0.0, 0.0, 0.02, 0.1)),
            duplicate=random.choice((0.0, 0.1, 0.5)),
            delay=random.choice((0.0, 0.1, 0.5)),
            delay_s=random.choice((0.5, 5.0, 60.0)),
            keeps_order=random.random() < 0.5,
        )
        # Repeated or overtaking frames are no fault that a record may show.
        if links.drop or (links.delay and links.delay_s > 0.5):
            self.faults.append(str(links))
        return links

    @property
    def is_calm(self) -> bool:
        """Whether nothing happens that a record may show."""
        return not self.faults and not (self.disputant is not None and self.disputes_at_attach)


@cache
def _packet(rank: int, number: int, is_empty: bool, has_disputed: bool) -> Packet:
    values: dict[str, Any] = {"everywhere": [float(number)] * (rank + 1), f"only.{rank % 2}": [1.0] * (number % 3)}
    if has_disputed:
        values[DISPUTED] = [2.0] * 5
    return make_packet(rank, NUM_RANKS, number, {} if is_empty else values)


def _offer(rank: int, sites: list[SiteSpec]) -> AttachOffer:
    return offer(rank, NUM_RANKS, DEADLINES, sites=tuple(sites))


def check_outcome(schedule: Schedule, world: SimulatedWorld) -> None:
    """Assert what holds after every schedule: an end, exact counts, a coverage, and no rank that believes too much."""
    root = world.ranks[0]
    for rank in world.ranks:
        _check_that_it_ended(rank)
    _check_record(schedule, world)
    reports = [rank.report for rank in world.ranks if rank.report is not None and not rank.is_dead]
    steps = [step.step for step in root.recorder.steps]
    is_complete = all(set(step.missing) == set(step.packet.abstained) for step in root.recorder.steps)
    for report in reports:
        assert report.num_committed <= len(steps)
        assert report.last_committed_step is None or report.last_committed_step in steps
        if report.failure is None:
            assert is_complete, "a rank believes in a complete record that is not"
            assert report.num_committed == len(steps)
    if schedule.is_calm:
        assert len(reports) == NUM_RANKS
        assert all(report == reports[0] for report in reports)
        assert reports[0].failure is None
        assert steps == [packet.step for _, packet in root.plan.steps]


def _check_that_it_ended(rank: SimulatedRank) -> None:
    if rank.is_dead:
        return
    assert rank.ended_at is not None, f"rank {rank.position.rank} hangs"
    assert (rank.refusal is None) != (rank.report is None)
    if rank.report is None:
        assert rank.ended_at - rank.plan.comes_at <= 3 * DEADLINES.attach_s
    else:
        assert rank.closed_at is not None
        assert rank.ended_at - rank.closed_at <= DEADLINES.close_s, f"rank {rank.position.rank} closes too slowly"


def _check_record(schedule: Schedule, world: SimulatedWorld) -> None:
    sent = {(r, packet.step): packet for r, rank in enumerate(world.ranks) for _, packet in rank.plan.steps}
    steps = world.ranks[0].recorder.steps
    assert [step.step for step in steps] == sorted({step.step for step in steps})
    told = [f for step in steps for f in step.packet.findings if f["code"] == "catalogue_conflict"]
    for step in steps:
        came = set(step.packet.ranks)
        assert came | set(step.missing) == set(range(NUM_RANKS))
        assert came & set(step.missing) == set(step.packet.abstained)
        assert all(step.missing.values())
        parts = [sent[rank, step.step] for rank in sorted(came)]
        for row, site in enumerate(step.sites):
            totals = [int(p.ints[p.sites == p.sites.dtype.type(site.site_id), TOTAL].sum()) for p in parts]
            scheduled = sum(int((p.sites == p.sites.dtype.type(site.site_id)).sum()) for p in parts)
            assert step.packet.num_scheduled[row] == scheduled
            if step.packet.presence[row] == Presence.UNSUPPORTED:
                assert site.name == DISPUTED
                assert told
                assert step.packet.ints[row, TOTAL] == 0
            else:
                assert step.packet.ints[row, TOTAL] == sum(totals)
    for finding in told:
        assert schedule.disputant in (*finding["ranks"], *finding["other_ranks"])
        assert (schedule.disputant in finding["ranks"]) != (schedule.disputant in finding["other_ranks"])
    if schedule.disputes_at_attach:
        assert not steps
        assert all(rank.refusal is not None for rank in world.ranks if not rank.is_dead)
        for rank in world.ranks:
            if isinstance(rank.refusal, CatalogueConflictError):
                assert schedule.disputant in rank.refusal.failures
