"""What has been recorded so far, as rank zero counts it and as every rank is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from telemetry.errors import RankfoldError
from telemetry.protocol import CloseReport, SinkReport

__all__ = ["Account", "report_from_wire", "report_to_wire"]


@dataclass(frozen=True)
class Account:
    """Running totals; they go down with every acknowledgement, so that a rank cut off later still has them.

    Attributes:
        num_committed, last_committed_step, num_partial, num_abstained: as in ``CloseReport``.
    """

    num_committed: int = 0
    last_committed_step: int | None = None
    num_partial: int = 0
    num_abstained: int = 0

    def with_step(self, step: int, *, is_partial: bool, num_abstained: int) -> Account:
        """Return the totals after one more step."""
        return replace(
            self,
            num_committed=self.num_committed + 1,
            last_committed_step=step,
            num_partial=self.num_partial + is_partial,
            num_abstained=self.num_abstained + num_abstained,
        )

    def to_wire(self) -> dict[str, Any]:
        """Return the totals as a JSON-serialisable dictionary."""
        return asdict(self)

    def report(
        self,
        failure: RankfoldError | None,
        missing: Iterable[int] = (),
        sinks: tuple[SinkReport, ...] = (),
        findings: tuple[Mapping[str, Any], ...] = (),
    ) -> CloseReport:
        """Return the account at close."""
        return CloseReport(
            **asdict(self), missing_ranks=tuple(sorted(missing)), failure=failure, sinks=sinks, findings=findings
        )


def report_to_wire(report: CloseReport) -> dict[str, Any]:
    """Return a close report as a JSON-serialisable dictionary."""
    return {
        **vars(report),
        "failure": report.failure and report.failure.to_wire(),
        "sinks": [asdict(sink) for sink in report.sinks],
    }


def report_from_wire(wire: Mapping[str, Any]) -> CloseReport:
    """Undo :func:`report_to_wire`."""
    return CloseReport(
        **{
            **wire,
            "missing_ranks": tuple(wire["missing_ranks"]),
            "failure": wire["failure"] and RankfoldError.from_wire(wire["failure"]),
            "sinks": tuple(SinkReport(**{**sink, "disclosures": tuple(sink["disclosures"])}) for sink in wire["sinks"]),
            "findings": tuple(wire["findings"]),
        }
    )
