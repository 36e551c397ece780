"""A finding is told once, however long it lasts, and no number of findings fills a screen."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from aggregator.checks import MAX_FINDINGS
from aggregator.findings import FindingLog

ROOT = Path(__file__).resolve().parents[2]


def finding(step, site="a", ranks=(3,), **fields):
    return {
        "code": "drift",
        "message": f"{site}\nof {list(ranks)}",
        "step": step,
        "site": site,
        "ranks": ranks,
        **fields,
    }


def test_a_finding_that_lasts_is_one_line_and_one_entry_with_its_count(caplog):
    log = FindingLog()
    for step in (1, 2, 5):
        log.add([finding(step, relative=step)])
    (told,) = log.report()
    assert (told["count"], told["step"], told["last_step"], told["relative"]) == (3, 1, 5, 1)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("rankfold", logging.WARNING)
    assert record.getMessage() == "[drift] a of [3] (step 1)"


def test_another_site_other_ranks_and_another_code_are_other_findings():
    log = FindingLog()
    log.add([finding(1), finding(1, site="b"), finding(1, ranks=(2, 3)), finding(1, code="other")])
    log.add([{"code": "capture", "message": "x", "rank": 1}, {"code": "capture", "message": "x", "rank": 2}])
    assert [told["count"] for told in log.report()] == [1] * 6


def test_screen_and_report_are_bounded_and_say_so(caplog):
    log = FindingLog()
    log.add(finding(1, site=f"site.{i}") for i in range(MAX_FINDINGS + 10))
    assert len(log.report()) == MAX_FINDINGS + 1
    assert (log.report()[-1]["code"], log.report()[-1]["count"]) == ("further_findings", 10)
    assert len(caplog.records) == 32
    assert "further findings are in the close report" in caplog.records[-1].getMessage()


def test_a_handler_that_raises_does_not_end_the_merge():
    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("no space left on device")

    handler, log = Broken(), FindingLog()
    logging.getLogger("rankfold").addHandler(handler)
    try:
        log.add([finding(1)])
    finally:
        logging.getLogger("rankfold").removeHandler(handler)
    assert len(log.report()) == 1


@pytest.mark.parametrize("is_configured", [False, True])
def test_without_any_logging_set_up_a_finding_goes_to_stderr_as_one_line(is_configured):
    script = f"""
import logging, sys
from aggregator.findings import FindingLog
assert not logging.getLogger().handlers and not logging.getLogger("rankfold").handlers
if {is_configured}:
    logging.getLogger("rankfold").setLevel(logging.ERROR)
FindingLog().add([{{"code": "drift", "message": "rank 3 is not equal", "step": 7}}] * 2)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert done.stderr == ("" if is_configured else "[drift] rank 3 is not equal (step 7)\n"), done.returncode
