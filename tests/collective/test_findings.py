"""What the merge finds reaches the history, the report of every rank, the sinks, and stderr once."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from aggregator import open_history
from aggregator.collective import CollectiveAggregator
from aggregator.sinks import JsonlSink
from aggregator.sinks.jsonl import read_lines
from telemetry.replicas import ReplicaTable
from tests.collective.worlds import PATIENT, offer
from tests.packets import make_packet, make_site
from tests.ranks import run_ranks

SITE = make_site("weight", placements=(("dp", "replica"),))
STEPS = (1, 2, 3, 4)


class _Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _a_replica_stays_different(rank, world_size, folder):
    kept = _Kept()
    logging.getLogger("rankfold").addHandler(kept)
    aggregator = CollectiveAggregator(fan_in=2)
    sinks = (JsonlSink(f"{folder}/metrics.jsonl"),)
    reply = aggregator.attach(replace(offer(rank, world_size, PATIENT), to=f"{folder}/run", sites=(SITE,), sinks=sinks))
    for step in STEPS:
        differs = rank == 2 and step > 1
        packet = make_packet(rank, world_size, step, {SITE.name: [1.0]}, define=False)
        table = ReplicaTable.of_rank(
            rank, np.array([SITE.site_id], np.uint64), np.zeros(1, np.int64), np.array([7 + differs]), np.zeros((1, 4))
        )
        aggregator.submit(replace(packet, run_id=reply.run_id, segment=reply.segment, replicas=table))
    return aggregator.close(), kept.lines


def test_a_replica_that_stays_different_is_told_once_and_recorded_at_every_step(tmp_path):
    results = run_ranks(_a_replica_stays_different, 4, str(tmp_path))
    reports = [report for report, _ in results]
    (told,) = reports[0].findings
    assert (told["code"], told["site"], told["ranks"], told["axes"]) == ("replica_disagreement", "weight", [2], ["dp"])
    assert (told["step"], told["last_step"], told["count"]) == (2, 4, 3)
    assert all(report.findings == reports[0].findings for report in reports)
    assert [len(lines) for _, lines in results] == [1, 0, 0, 0]
    assert "rank 2 is not equal" in results[0][1][0]
    assert open_history(tmp_path / "run").findings()["step"].to_pylist() == [2, 3, 4]
    steps = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["type"] == "step"]
    assert [line["num_findings"] for line in steps] == [0, 1, 1, 1]
