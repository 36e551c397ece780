"""What the run was, in a few facts that are read first."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa

from aggregator.history import History

__all__ = ["coverage_line", "run_facts", "segment_rows"]


def run_facts(history: History) -> dict[str, str]:
    """Return what is told of the run, in order, as words; what its record does not say is left out."""
    run, steps = history.manifest.get("run", {}), history.steps()
    facts = {
        "model": _model(run),
        "world size": _text(run.get("world_size")),
        "layout": _layout(run.get("layout") or {}),
        "steps": _steps(steps),
        "cadence": _cadence(run),
        "duration": _duration(steps),
        "sites": _sites(history.sites()),
        "coverage": coverage_line(steps),
        "segments": _segments(history.segments()),
        "host": _text(run.get("hostname")),
        "versions": ", ".join(f"{name} {run[name]}" for name in ("rankfold", "torch", "python") if name in run),
        "reduction": ", ".join(str(run[name]) for name in ("reduction_dtype", "backend") if name in run),
        "run id": history.run_id,
    }
    return {name: text for name, text in facts.items() if text}


def coverage_line(steps: pa.Table) -> str:
    """Say in one line whether all ranks are in all steps."""
    if not steps.num_rows:
        return "no step was committed"
    missing = [row for row in steps["missing_ranks"].to_pylist() if row]
    if not missing:
        return f"every rank is in each of the {steps.num_rows} steps"
    ranks = sorted({rank for row in missing for rank in row})
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {named} missing, in {len(missing)} of {steps.num_rows} steps"


def segment_rows(history: History) -> list[dict[str, str]]:
    """Return one row a segment for a table: what it continued, how far it came, what superseded it."""
    return [
        {
            "segment": str(row["segment"]),
            "began": _moment(row["started_unix_s"]),
            "continues at step": "the beginning" if row["resume_step"] is None else str(row["resume_step"]),
            "last step": _text(row["last_step"]) or "none",
            "superseded": "no" if row["end_step"] is None else f"from step {row['end_step']}",
            "closed": "yes" if row["sealed"] else "no (killed, or still writing)",
            "host": _text(row["host"]),
        }
        for row in history.segments().to_pylist()
    ]


def _model(run: dict[str, Any]) -> str:
    wrapped = f" in {run['wrapped_in']}" if run.get("wrapped_in") else ""
    return f"{run['model']}{wrapped}" if run.get("model") else ""


def _layout(layout: dict[str, Any]) -> str:
    axes = " × ".join(f"{name}={size}" for name, size in layout.get("axes") or ())
    experts = " × ".join(f"{name}={size}" for name, size in layout.get("expert_axes") or ())
    text = f"{axes}; experts {experts}" if experts else axes
    return f"{text} (assumed: none was declared)" if text and layout.get("declared") is False else text


def _steps(steps: pa.Table) -> str:
    if not steps.num_rows:
        return "none"
    numbers = steps["step"].to_pylist()
    skipped = sum(1 for count in steps["num_skipped"].to_pylist() if count)
    told = f"{len(numbers):,} recorded, from {numbers[0]:,} to {numbers[-1]:,}"
    return f"{told}; the optimizer skipped {skipped}" if skipped else told


def _cadence(run: dict[str, Any]) -> str:
    by_kind = run.get("every") or {}
    values = sorted(set(by_kind.values()))
    told = f"every {values[0]} steps" if len(values) == 1 else ", ".join(f"{k} every {n}" for k, n in by_kind.items())
    told = "every step" if values == [1] else told
    return f"{told}; histograms every {run['hist_every']}" if run.get("hist_every") else told


def _duration(steps: pa.Table) -> str:
    times = [time for time in steps["wall_time_s"].to_pylist() if time]
    if len(times) < 2:
        return ""
    return f"{timedelta(seconds=round(times[-1] - times[0]))} h:min:s from the first recorded step to the last"


def _sites(sites: pa.Table) -> str:
    kinds = sites["kind"].to_pylist()
    return ", ".join(f"{kinds.count(kind):,} {kind}" for kind in dict.fromkeys(kinds)) or "none"


def _segments(segments: pa.Table) -> str:
    if segments.num_rows == 1:
        return "one, closed" if segments["sealed"][0].as_py() else "one, not closed: killed, or still writing"
    resumed = [str(step) for step in segments["resume_step"].to_pylist() if step is not None]
    return f"{segments.num_rows}; continued at step {', '.join(resumed)}" if resumed else str(segments.num_rows)


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
