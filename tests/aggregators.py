"""Aggregators that keep every packet in memory, for tests that look at what ranks send and how it merges."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from aggregator.catalogue import Catalogue
from aggregator.merge import merge_packets
from telemetry.errors import RankfoldError
from telemetry.packet import Packet
from telemetry.presence import Presence
from telemetry.protocol import AttachOffer, AttachReply, CloseReport
from telemetry.sites import SiteSpec
from telemetry.summary import Histogram, TensorSummary


class KeepingAggregator:
    """Implements ``telemetry.Aggregator``; ``failure`` can be set to play a merge that has stopped."""

    def __init__(self) -> None:
        self.offer: AttachOffer | None = None
        self.packets: list[Packet] = []
        self.failure: RankfoldError | None = None
        self.num_closed = 0

    def attach(self, offer: AttachOffer) -> AttachReply:
        self.offer = offer
        if offer.failure is not None:
            raise offer.failure
        return AttachReply("test-run", 0, offer.disabled_by)

    def submit(self, packet: Packet) -> None:
        # Through the bytes, so that each test also shows that what it looks at survives the wire.
        self.packets.append(Packet.from_bytes(packet.to_bytes()))

    def close(self) -> CloseReport:
        self.num_closed += 1
        last = self.packets[-1].step if self.packets else None
        return CloseReport(num_committed=len(self.packets), last_committed_step=last)

    @property
    def steps(self) -> list[int]:
        return [packet.step for packet in self.packets]

    def sites(self) -> dict[tuple[str, str], SiteSpec]:
        assert self.offer is not None
        specs = [*self.offer.sites, *(site for packet in self.packets for site in packet.definitions)]
        return {(site.kind, site.name): site for site in specs}

    def summary(self, kind: str, name: str, step: int) -> TensorSummary:
        """Return the row of a site as a summary; the row must be observed."""
        packet, row = self._row(kind, name, step)
        assert packet.presence[row] == Presence.OBSERVED, self.presence(kind, name, step)
        counted = packet.hist_sites.tolist()
        histogram = None
        if (site_id := int(packet.sites[row])) in counted:
            histogram = Histogram(packet.descriptor, packet.hist_counts[counted.index(site_id)])
        return TensorSummary(packet.ints[row], packet.floats[row], histogram)

    def presence(self, kind: str, name: str, step: int) -> tuple[Presence, str]:
        packet, row = self._row(kind, name, step)
        reason = int(packet.reason[row])
        return Presence(int(packet.presence[row])), packet.reasons[reason] if reason >= 0 else ""

    def rows(self, step: int) -> set[tuple[str, str]]:
        packet = self.packets[self.steps.index(step)]
        by_id = {site.site_id: key for key, site in self.sites().items()}
        return {by_id[int(site_id)] for site_id in packet.sites}

    def _row(self, kind: str, name: str, step: int) -> tuple[Packet, int]:
        packet = self.packets[self.steps.index(step)]
        site_id = self.sites()[kind, name].site_id
        return packet, packet.sites.tolist().index(site_id)


class GatheringAggregator(KeepingAggregator):
    """Gathers every step on rank zero through the default group, at once; other ranks keep nothing.

    It has no deadline and no thread, so a test that uses it looks at what ranks send and how that merges, and at
    nothing else.
    """

    def attach(self, offer: AttachOffer) -> AttachReply:
        reply = super().attach(offer)
        gathered: list[tuple[SiteSpec, ...]] = [()] * offer.world_size
        dist.all_gather_object(gathered, offer.sites)
        catalogue = Catalogue()
        for sites in gathered:
            _, conflicts = catalogue.add(sites)
            assert not conflicts, conflicts
        self.offer = replace(offer, sites=tuple(catalogue))
        return reply

    def submit(self, packet: Packet) -> None:
        gathered: list[bytes] = [b""] * packet.world_size
        dist.all_gather_object(gathered, packet.to_bytes())
        self.packets.append(merge_packets([Packet.from_bytes(data) for data in gathered]))
