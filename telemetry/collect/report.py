"""The account that a session gives at its close: what became of every scheduled observation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from telemetry.presence import Presence
from telemetry.protocol import CloseReport

__all__ = ["SessionReport"]


@dataclass(frozen=True)
class SessionReport:
    """What a session did on this rank, and what the merge made of all ranks' steps.

    Attributes:
        to, rank, world_size: destination, and this rank in its job.
        num_steps: step scopes that ended without an exception.
        num_logged: of them, those that were due and handed over.
        num_unlogged: due steps that were not handed over, because merging had stopped by then.
        observations: (kind, presence) → number of scheduled observations on this rank.
        never_ran: selected modules that no logged step ever ran.
        never_met: kinds of call sites that the session listened to and no logged step met.
        self_s, step_s: our time and the whole time in the logged steps' scopes, seconds.
        num_passed_over: forward passes whose step number repeated or went back, where a callable tells the number.
        step_source_failure: what that callable raised, or "".
        merge: the aggregator's account.
    """

    to: str
    rank: int
    world_size: int
    num_steps: int
    num_logged: int
    num_unlogged: int
    observations: Mapping[tuple[str, Presence], int]
    never_ran: tuple[str, ...]
    never_met: tuple[str, ...]
    self_s: float
    step_s: float
    merge: CloseReport
    num_passed_over: int = 0
    step_source_failure: str = ""

    def __str__(self) -> str:
        share = f"{self.self_s / self.step_s:.1%}" if self.step_s > 0 else "none"
        lines = [
            f"Rankfold report for {self.to} (rank {self.rank} of {self.world_size})",
            f"  {self.num_steps} steps, {self.num_logged} logged, {self.merge.num_committed} committed; "
            f"our share of the logged steps' time: {share}",
        ]
        lines += self._observation_lines()
        if self.never_ran:
            shown = ", ".join(self.never_ran[:5]) + (", …" if len(self.never_ran) > 5 else "")
            lines.append(f"  {len(self.never_ran)} selected modules never ran in a logged step: {shown}")
        if self.num_passed_over:
            lines.append(f"  {self.num_passed_over} forward passes were not recorded: their step repeated or went back")
        if self.step_source_failure:
            lines.append(f"  the step callable raised {self.step_source_failure}; no step was recorded after that")
        if self.never_met:
            lines.append(f"  no logged step met a call site of the kinds {', '.join(self.never_met)}")
        if self.num_steps > 0 and not self.observations:
            lines.append("  WARNING: nothing was observed; no step was due, or nothing that was selected ran")
        return "\n".join([*lines, *self._merge_lines()])

    def _observation_lines(self) -> list[str]:
        by_kind: dict[str, Counter[Presence]] = {}
        for (kind, presence), count in self.observations.items():
            by_kind.setdefault(kind, Counter())[presence] += count
        return [
            f"  {kind:<18}" + ", ".join(f"{count} {presence.label}" for presence, count in sorted(counts.items()))
            for kind, counts in by_kind.items()
        ]

    def _merge_lines(self) -> list[str]:
        merge, lines = self.merge, []
        if merge.num_partial:
            lines.append(f"  {merge.num_partial} steps lack some ranks")
        if merge.num_abstained:
            lines.append(f"  {merge.num_abstained} packets were dropped because too many steps were in flight")
        if merge.missing_ranks:
            lines.append(f"  missing ranks: {', '.join(map(str, merge.missing_ranks))}")
        if self.num_unlogged:
            lines.append(f"  {self.num_unlogged} due steps were not recorded: merging had stopped")
        if merge.failure is not None:
            lines.append(f"  merging stopped: {merge.failure}")
        for sink in merge.sinks:
            lines += [f"  {sink}", *(f"    {sentence}" for sentence in sink.disclosures)]
        lines += [_finding_line(finding) for finding in merge.findings[:20]]
        return lines


def _finding_line(finding: Mapping[str, Any]) -> str:
    again = f" (at {finding['count']} steps)" if finding.get("count", 1) > 1 else ""
    return f"  finding {finding['code']}: {finding['message']}{again}"
