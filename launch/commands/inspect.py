"""``rankfold inspect``: what a run was, what it holds, what was found wrong, and what it cost."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa

from aggregator.history import History
from launch.commands.shared import (
    JsonOption,
    RunArgument,
    SalvageOption,
    console,
    open_run,
    plain_table,
    print_json,
    print_losses,
    salvage_remedy,
)

__all__ = ["describe_run", "inspect"]


def inspect(run: RunArgument, as_json: JsonOption = False, salvage: SalvageOption = False) -> None:
    """Show identity, layout, sites, coverage, findings and cost of a run."""
    with salvage_remedy(salvage):
        history = open_run(run, salvage=salvage)
        found = describe_run(history)
    if as_json:
        print_json(found)
    else:
        _print(found)
    print_losses(history)


def describe_run(history: History) -> dict[str, Any]:
    """Return what the command shows, JSON-serialisable."""
    segments = history.segments().to_pylist()
    record = json.loads(segments[-1]["run"]) if segments else dict(history.manifest["run"])
    steps, sites = history.steps(), history.sites()
    everything = history.steps(include_superseded=True)
    return {
        "path": str(history.path),
        "run_id": history.run_id,
        "created": _time(history.manifest.get("created_unix_s")),
        "state": "closed" if segments and segments[-1]["sealed"] else "open",
        "record": record,
        "segments": [{key: value for key, value in segment.items() if key != "run"} for segment in segments],
        "steps": {
            "num_steps": steps.num_rows,
            "first": steps["step"][0].as_py() if steps.num_rows else None,
            "last": steps["step"][-1].as_py() if steps.num_rows else None,
            "num_superseded": everything.num_rows - steps.num_rows,
            "num_skipped": sum(count > 0 for count in steps["num_skipped"].to_pylist()),
            "modes": dict(Counter(steps["mode"].to_pylist())),
        },
        "sites": dict(Counter(sites["kind"].to_pylist())),
        "presence": _presence(history),
        "coverage": _coverage(steps),
        "findings": _findings(history),
        "cost": _cost(steps),
    }


def _presence(history: History) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for batch in history.observation_batches(columns=["kind", "presence"]):
        grouped = pa.table([batch["kind"].cast(pa.string()), batch["presence"].cast(pa.string())], ["kind", "presence"])
        for row in grouped.group_by(["kind", "presence"]).aggregate([([], "count_all")]).to_pylist():
            counts.setdefault(row["kind"], Counter())[row["presence"]] += row["count_all"]
    return {kind: dict(presences) for kind, presences in counts.items()}


def _coverage(steps: pa.Table) -> dict[str, Any]:
    missing: Counter[int] = Counter()
    for ranks in steps["missing_ranks"].to_pylist():
        missing.update(ranks)
    partial = sum(len(ranks) > 0 for ranks in steps["missing_ranks"].to_pylist())
    return {"num_complete": steps.num_rows - partial, "num_partial": partial, "missing": dict(sorted(missing.items()))}


def _findings(history: History) -> list[dict[str, Any]]:
    """Return the findings by code: how often, since when, and the newest message."""
    by_code: dict[str, dict[str, Any]] = {}
    for row in history.findings().to_pylist():
        entry = by_code.setdefault(row["code"], {"code": row["code"], "count": 0, "first_step": row["step"]})
        entry.update(count=entry["count"] + 1, last_step=row["step"], message=row["message"], site=row["site"])
    return sorted(by_code.values(), key=lambda entry: -int(entry["count"]))


def _cost(steps: pa.Table) -> dict[str, Any]:
    def column(name: str) -> np.ndarray[Any, Any]:
        return np.asarray(steps[name].to_numpy(), dtype=np.float64)

    if not steps.num_rows:
        return {}
    own, whole = column("self_s"), column("step_s")
    merge = column("merge_s")
    return {
        "own_share": float(own.sum() / whole.sum()) if whole.sum() else None,
        "median_self_ms": float(np.median(own) * 1e3),
        "median_step_ms": float(np.median(whole) * 1e3),
        "median_merge_ms": float(np.nanmedian(merge) * 1e3) if np.isfinite(merge).any() else None,
        "read_bytes_a_step": float(np.nanmedian(column("read_bytes"))) if steps["read_bytes"].null_count == 0 else None,
        "num_budget_dropped": int(np.nansum(column("num_budget_dropped"))),
    }


def _time(unix_s: float | None) -> str | None:
    return None if unix_s is None else datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="seconds")


def _print(found: dict[str, Any]) -> None:
    out, record, steps = console(), found["record"], found["steps"]
    axes = " × ".join(f"{name} {size}" for name, size in record.get("layout", {}).get("axes", []))
    declared = "" if record.get("layout", {}).get("declared", True) else " (assumed)"
    every = record.get("every", {})
    out.print(f"[bold]{found['path']}[/bold]  run {found['run_id'][:8]}, {found['state']}, begun {found['created']}")
    out.print(f"  {record.get('model')} on {record.get('world_size')} ranks, layout {axes or 'none'}{declared}")
    out.print(f"  torch {record.get('torch')}, kernels {record.get('backend')}, host {record.get('hostname')}")
    out.print(f"  every {', '.join(f'{name} {n}' for name, n in every.items())}; histograms {record.get('hist_every')}")
    superseded = f", {steps['num_superseded']} superseded" if steps["num_superseded"] else ""
    skipped = f", {steps['num_skipped']} skipped by the scaler" if steps["num_skipped"] else ""
    out.print(f"  {steps['num_steps']} steps, {steps['first']} to {steps['last']}{superseded}{skipped}")
    rows: list[tuple[Any, ...]] = [
        (
            s["segment"],
            s["resume_step"],
            s["last_step"],
            s["num_commits"],
            s["sealed"],
            s["host"],
            _time(s["started_unix_s"]),
        )
        for s in found["segments"]
    ]
    names: tuple[str, ...] = ("segment", "from step", "last step", "commits", "closed", "host", "begun")
    out.print(plain_table("\nSegments", names, rows, right=names[:4]))
    rows = [
        (kind, count, ", ".join(f"{n:,} {word}" for word, n in found["presence"].get(kind, {}).items()))
        for kind, count in found["sites"].items()
    ]
    out.print(plain_table("\nSites", ("kind", "sites", "observations"), rows, right=("sites",)))
    coverage = found["coverage"]
    out.print(
        f"\n[bold]Coverage[/bold]  {coverage['num_complete']} steps of all ranks, {coverage['num_partial']} lack some"
    )
    for rank, count in list(coverage["missing"].items())[:10]:
        out.print(f"  rank {rank} is missing from {count} steps")
    if found["findings"]:
        rows = [(f["code"], f["count"], f["first_step"], f["last_step"], f["message"]) for f in found["findings"]]
        names = ("code", "count", "first step", "last step", "newest")
        out.print(plain_table("\nFindings", names, rows, right=names[1:4]))
    else:
        out.print("\n[bold]Findings[/bold]  none")
    if cost := found["cost"]:
        share = "unknown" if cost["own_share"] is None else f"{cost['own_share']:.1%}"
        out.print(
            f"\n[bold]Cost[/bold]  {share} of the logged steps' time; median {cost['median_self_ms']:.3g} ms "
            f"of {cost['median_step_ms']:.3g} ms"
            + ("" if cost["median_merge_ms"] is None else f", merged after {cost['median_merge_ms']:.3g} ms")
            + (
                f"; {cost['num_budget_dropped']:,} observations left out for the budget"
                if cost["num_budget_dropped"]
                else ""
            )
        )
