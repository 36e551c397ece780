"""What a run has found: each finding shown once, and counted from then on.

A finding stands in the history at every step that it was made at. A replica that stays different would fill a screen
and a report with one sentence, so both have it once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from aggregator.checks import MAX_FINDINGS

__all__ = ["FindingLog"]

Finding = Mapping[str, Any]

_MAX_SHOWN: Final = 32
# Nothing is configured here: without a handler, Python writes warnings to stderr as they are.
_LOGGER: Final = logging.getLogger("rankfold")


class FindingLog:
    """Findings by code, site, kind and ranks. Used where the record is written, on one thread.

    A new one is a warning of the logger ``rankfold``, which reaches stderr unless the user's logging says otherwise.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._num_further = 0

    def add(self, findings: Iterable[Finding], *, show: bool = True) -> None:
        """Take in the findings of one step; ``show`` is False for those that were shown by an earlier process."""
        for finding in findings:
            key = _key(finding)
            known = self._found.get(key)
            if known is not None:
                known["count"] += 1
                known["last_step"] = finding.get("step")
            elif len(self._found) < MAX_FINDINGS:
                self._found[key] = {**finding, "count": 1, "last_step": finding.get("step")}
                if show:
                    self._show(finding)
            else:
                self._num_further += 1

    def report(self) -> tuple[Finding, ...]:
        """Return each finding once, as it was first made, with ``count`` and ``last_step``; a bounded number."""
        found: tuple[Finding, ...] = tuple(self._found.values())
        return (*found, self._further()) if self._num_further else found

    def _further(self) -> Finding:
        text = f"{self._num_further} findings beyond the first {MAX_FINDINGS} different ones are in the history alone"
        return {"code": "further_findings", "message": text, "count": self._num_further}

    def _show(self, finding: Finding) -> None:
        if len(self._found) < _MAX_SHOWN:
            _warn(_line(finding))
        elif len(self._found) == _MAX_SHOWN:
            _warn(f"{_line(finding)}; further findings are in the close report and in the history")


def _key(finding: Finding) -> tuple[Any, ...]:
    named = (*finding.get("ranks", ()), finding.get("rank"))
    return finding["code"], finding.get("site"), finding.get("kind"), named


def _line(finding: Finding) -> str:
    where = "" if finding.get("step") is None else f" (step {finding['step']})"
    return f"[{finding['code']}] {' '.join(str(finding['message']).split())}{where}"


def _warn(line: str) -> None:
    # A handler of the user's that raises must not end the merge.
    with suppress(Exception):
        _LOGGER.warning("%s", line)
