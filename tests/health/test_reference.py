"""The page of findings says what the code can find, with the thresholds that are in force."""

import ast
import re
from dataclasses import asdict
from pathlib import Path

from aggregator.health import Thresholds
from aggregator.health.monitor import CHECK_FAILED, HEALTH_CHECKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/findings.md").read_text()


def rows_below(header):
    table = PAGE.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def codes_written_as_literals():
    """Return the values of every ``"code": "…"`` in a dictionary of our packages."""
    found = set()
    for path in [*ROOT.glob("aggregator/**/*.py"), *ROOT.glob("telemetry/**/*.py")]:
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
                if isinstance(key, ast.Constant) and key.value == "code" and isinstance(value, ast.Constant):
                    found.add(value.value)
    return found


def test_the_page_lists_every_code_of_a_finding_and_invents_none():
    listed = [row[0].strip("`") for row in rows_below("Code")]
    codes = codes_written_as_literals() | {check.code for check in HEALTH_CHECKS} | {CHECK_FAILED}
    assert len(listed) == len(set(listed))
    assert set(listed) == codes


def test_every_code_has_a_meaning_evidence_and_a_remedy():
    assert all(len(row) == 4 and all(row) for row in rows_below("Code"))


def test_the_page_lists_every_threshold_with_its_default():
    listed = {row[0].strip("`"): row[1] for row in rows_below("Threshold")}
    assert listed == {name: str(value) for name, value in asdict(Thresholds()).items()}


def test_each_check_names_the_thresholds_that_exist():
    names = asdict(Thresholds()).keys()
    assert all(set(check.limits) <= names for check in HEALTH_CHECKS)
    assert re.search(r"\bfirst six\b", PAGE)
    assert len(HEALTH_CHECKS) == 6
