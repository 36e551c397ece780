"""The same job through the actor and over the tree: one record, whichever way the packets went."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from aggregator import open_history
from aggregator.sinks import JsonlSink
from aggregator.sinks.jsonl import read_lines
from telemetry.summary import FLOAT_FIELDS, INT_FIELDS
from tests.ranks import run_ranks
from tests.ray.clusters import connected
from tests.watch.jobs import STEPS, read, train

TIMES = {"wall_time_s", "step_s", "self_s", "transfer_s", "merge_s"}


def train_through(rank: int, world_size: int, folder: Path, address: str) -> dict:
    """Train once over the tree, once through the actor, and once unobserved."""
    results = {}
    with connected(address):
        for way in ("collective", "ray"):
            run = folder / way
            to = str(run) if way == "collective" else f"ray://{folder.name}?dir={run}"
            results[way] = train(rank, world_size, to, random=True, sinks=[JsonlSink(folder / f"{way}.jsonl")])
        results["unobserved"] = train(rank, world_size, None, random=True)
    return results


def steps_of(path: Path) -> list[dict]:
    return [{name: row[name] for name in row.keys() - TIMES} for row in open_history(path).steps().to_pylist()]


def shown(path: Path) -> list[dict]:
    """The lines of a JSONL sink without what differs between any two runs."""
    own = {"run_id", "run", *TIMES}
    return [{name: line[name] for name in line.keys() - own} for line in read_lines(path)]


def test_the_record_equals_that_of_the_tree_and_training_is_untouched(cluster, tmp_path):
    results = run_ranks(train_through, 3, tmp_path, cluster.address, deadline_s=110)
    tree, actor = read(tmp_path / "collective"), read(tmp_path / "ray")
    assert tree.keys() == actor.keys()
    assert len(tree) > 100
    for key, expected in tree.items():
        found = actor[key]
        assert [found[name] for name in INT_FIELDS] == [expected[name] for name in INT_FIELDS], key
        assert found["bins"] == expected["bins"], key
        assert found["presence"] == expected["presence"], key
        for name in FLOAT_FIELDS:
            assert math.isclose(found[name], expected[name], rel_tol=1e-12, abs_tol=1e-300), (key, name)
    assert steps_of(tmp_path / "ray") == steps_of(tmp_path / "collective")
    for table in ("sites", "findings", "coverage"):
        assert getattr(open_history(tmp_path / "ray"), table)().equals(
            getattr(open_history(tmp_path / "collective"), table)()
        ), table
    ways = [json.dumps(shown(tmp_path / f"{way}.jsonl"), sort_keys=True) for way in ("ray", "collective")]
    assert len(ways[0]) > 10_000
    assert [line["type"] for line in json.loads(ways[0])] == [line["type"] for line in json.loads(ways[1])]
    for of_rank in results:
        accounts = [vars(of_rank[way]["report"].merge) for way in ("collective", "ray")]
        assert accounts[0]["num_committed"] == STEPS
        # Over the tree only rank zero knows of the sinks; the actor tells every rank.
        assert {k: v for k, v in accounts[0].items() if k != "sinks"} == {
            k: v for k, v in accounts[1].items() if k != "sinks"
        }
        assert [(sink.name, sink.state, sink.num_emitted) for sink in accounts[1]["sinks"]] == [("jsonl", "ok", STEPS)]
        for way in ("collective", "ray"):
            assert of_rank[way]["losses"] == of_rank["unobserved"]["losses"]
            for name, value in of_rank["unobserved"]["state"].items():
                assert np.array_equal(of_rank[way]["state"][name], value), name
