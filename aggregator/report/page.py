"""The report as one HTML file that needs nothing else: text and tables, pictures, and charts that answer."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

import numpy as np

from aggregator.report.account import Cost, RankCoverage
from aggregator.report.colours import COVERAGE, MARKS
from aggregator.report.contents import Contents
from aggregator.report.data import page_data
from aggregator.report.evidence import MAX_SHOWN, FoundOnce
from aggregator.report.identity import coverage_line, run_facts, segment_rows
from aggregator.report.optional import required
from aggregator.report.payload import packed_text, script_json
from aggregator.report.pictures import embedded_png, pictures_of
from aggregator.report.scale import shown_number
from aggregator.report.spark import sparkline
from telemetry.version import VERSION

__all__ = ["page_of"]

_PARTS: Final = (
    ("findings", "Findings"),
    ("over-time", "Layers over time"),
    ("depth", "Depth"),
    ("histograms", "Histograms"),
    ("update-to-weight", "Update to weight"),
    ("ranks", "Ranks and replicas"),
    ("own-cost", "Cost"),
)
_MAX_ROWS: Final = 100


def page_of(contents: Contents, title: str) -> str:
    """Return the HTML of a report.

    Raises:
        ReportUnavailableError: plotly, matplotlib or Jinja is not installed.
    """
    history, account = contents.history, contents.account
    descriptor, steps = history.descriptor, history.steps()
    environment = required("jinja2").Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string(_asset("page.html.jinja"))
    return str(
        template.render(
            title=title,
            version=VERSION,
            css=_asset("page.css"),
            js=_asset("page.js"),
            plotly=packed_text(required("plotly.offline").get_plotlyjs().encode(), level=9),
            data=script_json(page_data(contents)),
            pictures=_embedded(contents),
            parts=_PARTS,
            marks=MARKS,
            coverage_key=COVERAGE,
            facts=run_facts(history),
            segments=segment_rows(history),
            verdict=_verdict(contents),
            checks=_checks(history.manifest.get("run", {})),
            findings=[_finding(found) for found in contents.findings[:MAX_SHOWN]],
            num_findings=len(contents.findings),
            has_grid=bool(contents.grids),
            has_profile=bool(contents.profile),
            has_ridges=bool(contents.ridges),
            has_ratio=contents.has_ratio,
            column_words=_column_words(contents),
            ridge_words=_ridge_words(contents),
            lo_exp=descriptor.lo_exp,
            hi_exp=descriptor.hi_exp,
            coverage_line=coverage_line(steps),
            rank_words=_rank_words(contents.coverage),
            reasons=[{"why ranks were missing": why, "rank-steps": f"{n:,}"} for why, n in contents.coverage.reasons],
            replica_words=_replica_words(account.replicas),
            replicas=[
                {"kind": kind, "agree": f"{agree:,}", "disagree": f"{disagree:,}", "not checked": f"{unknown:,}"}
                for kind, agree, disagree, unknown in account.replicas
            ],
            disagreeing=[
                {"site": site, "kind": kind, "first step": step, "observations": f"{count:,}"}
                for site, kind, step, count in account.disagreeing[:_MAX_ROWS]
            ],
            presence=[
                {"kind": kind, "what became of it": word, "reason": reason, "observations": f"{count:,}"}
                for kind, word, reason, count in account.presence[:_MAX_ROWS]
            ],
            cost_rows=_cost_rows(contents.cost),
            footnotes=_footnotes(contents),
        )
    )


def _asset(name: str) -> str:
    return (files("aggregator.report") / "page" / name).read_text(encoding="utf-8")


def _embedded(contents: Contents) -> dict[str, dict[str, str]]:
    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode("ascii")

    return {
        name: {
            "alt": picture.alt,
            "light": encoded(embedded_png(picture.draw(False))),
            "dark": encoded(embedded_png(picture.draw(True))),
        }
        for name, picture in pictures_of(contents).items()
    }


def _verdict(contents: Contents) -> str:
    bad = sum(count for _, word, _, count in contents.account.presence if word != "observed")
    total = sum(count for *_, count in contents.account.presence)
    observed = f"{total:,} observations were due, {'all were made' if not bad else f'{bad:,} of them have no numbers'}"
    return f"{observed}. {coverage_line(contents.history.steps()).capitalize()}."


def _checks(run: Mapping[str, Any]) -> str:
    if run.get("health"):
        return "The built-in checks were on."
    return "The built-in checks were off, or the record does not say."


def _finding(found: FoundOnce) -> dict[str, Any]:
    steps = found.steps
    when = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}, {len(steps):,} times"
    evidence: list[tuple[str, str]] = [
        ("step", when),
        *((name, _shown(value)) for name, value in found.details.items()),
    ]
    # Of the counts only those tell something that are not zero.
    told = {name: value for name, value in found.observed.items() if value not in (None, "observed", "")}
    rare = ("nan", "pos_inf", "neg_inf", "zero")
    observed = [(f"{name} of the site", _shown(value)) for name, value in told.items() if value or name not in rare]
    known = {name for name, _ in evidence}
    return {
        "code": found.code,
        "message": found.message,
        "site": found.site,
        "kind": found.kind,
        "evidence": [*evidence, *((name, value) for name, value in observed if name.split()[0] not in known)],
        "spark": sparkline(found.series, steps, "rms of the site over the steps"),
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return shown_number(float(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_shown(one) for one in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    return str(value)


def _column_words(contents: Contents) -> str:
    if contents.spans.every == 1:
        return " at one step"
    width, num = contents.spans.every, contents.spans.num_steps
    return (
        f" over {width:,} steps, merged exactly as ranks are: {num:,} recorded steps were too many to show one by one"
    )


def _ridge_words(contents: Contents) -> str:
    shown = max((len(ridges.steps) for ridges in contents.ridges), default=0)
    if contents.num_histogram_steps <= shown:
        return ""
    return f"Shown are {shown} of the {contents.num_histogram_steps:,} steps that have histograms, evenly chosen."


def _rank_words(seen: RankCoverage) -> str:
    if len(seen.ranks) == seen.world_size or not len(seen.steps):
        return ""
    shown = f"the {len(seen.ranks)} shown are those that were away first" if seen.ranks else "none was ever away"
    return f"Of {seen.world_size:,} ranks, {shown}."


def _replica_words(replicas: Sequence[tuple[str, int, int, int]]) -> str:
    good, bad = sum(row[1] for row in replicas), sum(row[2] for row in replicas)
    if bad:
        return f"In {bad:,} observations, ranks that should hold the same bits did not; the numbers are those of one."
    if good:
        return f"Ranks that should hold the same bits did, in all {good:,} observations that could be compared."
    return "Nothing was held by several ranks, or no copies were compared."


def _cost_rows(spent: Cost) -> list[dict[str, str]]:
    if not len(spent.steps):
        return []
    total, own = float(np.nansum(spent.step_s)), float(np.nansum(spent.self_s))
    rows = {
        "share of the recorded steps' time": f"{100 * own / total:.2f} %" if total else "unknown: no step was timed",
        "on the training thread, median of a recorded step": _milliseconds(spent.self_s),
        "of it: transfer to the host": _milliseconds(spent.transfer_s),
        "merge over ranks, in the background, median": _milliseconds(spent.merge_s),
        "bytes of tensors reduced, all recorded steps": _bytes(spent.read_bytes),
        "observations left out to keep a budget": shown_number(float(np.nansum(spent.num_budget_dropped))),
    }
    return [{"what": name, "value": value} for name, value in rows.items()]


def _milliseconds(seconds: np.ndarray[Any, Any]) -> str:
    known = seconds[np.isfinite(seconds)]
    return f"{1e3 * float(np.median(known)):.3g} ms" if len(known) else "not recorded"


def _bytes(sizes: np.ndarray[Any, Any]) -> str:
    known = sizes[np.isfinite(sizes)]
    return f"{float(known.sum()) / 2**30:,.3g} GiB" if len(known) else "not recorded"


def _footnotes(contents: Contents) -> list[str]:
    estimated = contents.history.sites()["estimated"].to_pylist()
    notes = [
        f"Written by Rankfold {VERSION}. This file holds all it needs and asks nothing of any network; charts are "
        "drawn by Plotly, which is in it compressed and is unpacked by the browser.",
        "Numbers in the charts have four significant digits; the record has all of them: "
        "aggregator.open_history, or the command line.",
        "Steps that were superseded by a later attempt are not counted here.",
    ]
    if any(estimated):
        notes.append(f"{sum(estimated):,} sites were sampled: sums and norms are estimates of the whole.")
    return notes
