"""Attach through the actor: the same refusals as over the tree, on every rank, with a deadline."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import ray

from aggregator import open_history
from aggregator.ray_actor.joining import make_request
from aggregator.ray_actor.ledger import Mark
from aggregator.ray_actor.messages import Refused
from aggregator.ray_actor.query import read_status
from aggregator.ray_actor.root import Root
from telemetry.errors import (
    AttachTimeoutError,
    CatalogueConflictError,
    ConfigurationError,
    LayoutMismatchError,
    NothingSelectedError,
    ProcessGroupMissingError,
    SignalUnknownError,
    SinkUnavailableError,
    SketchDescriptorMismatchError,
)
from telemetry.protocol import Deadlines
from telemetry.summary import HistogramDescriptor
from tests.collective.worlds import offer
from tests.packets import make_site
from tests.ray.clusters import PATIENT, Rank, in_parallel, status_of, wait_until, world


class Stubborn:
    """A sink that does not pickle."""

    name = "stubborn"
    capabilities = frozenset()
    open = emit = flush = close = staticmethod(lambda *args: None)

    def __reduce__(self):
        raise TypeError("holds a socket")


def refused(name, path, world_size=4, changes=None, deadlines=PATIENT, absent=()):
    """Let ranks come to one root in this process, each with its changes; return what it tells each."""

    async def meet():
        root = Root(Mark(name, "attempt"), 16, pickle_charter=ray.cloudpickle.dumps)
        offers = [
            replace(offer(rank, world_size, deadlines, to=str(path)), **(changes or {}).get(rank, {}))
            for rank in range(world_size)
            if rank not in absent
        ]
        answers = await asyncio.gather(*(root.join(make_request(one, "node")) for one in offers))
        assert (await root.status()).state == "stopped"
        return answers

    answers = asyncio.run(asyncio.wait_for(meet(), 30))
    assert all(isinstance(answer, Refused) for answer in answers), answers
    assert not path.exists()
    return [answer.error for answer in answers]


def test_a_refusal_of_some_ranks_is_told_to_all_with_every_reason_and_leaves_no_trace(name, tmp_path):
    failures = {
        1: {"failure": NothingSelectedError("select matched nothing", remedy="look at session.plan")},
        3: {"failure": SignalUnknownError("signals has 'loss'")},
    }
    for error in refused(name, tmp_path / "run", changes=failures):
        assert type(error) is NothingSelectedError
        assert error.failures == {1: "select matched nothing", 3: "signals has 'loss'"}
        assert (error.rank, error.remedy) == (1, "look at session.plan")


@pytest.mark.parametrize(
    ("changes", "expected", "text"),
    [
        ({1: {"descriptor": HistogramDescriptor(bins_per_octave=8)}}, SketchDescriptorMismatchError, "rank 1:"),
        ({1: {"resume_step": 100}}, ConfigurationError, "resume_step"),
        ({1: {"cadence": {"every": 7}}}, ConfigurationError, "cadence"),
        ({1: {"world_size": 5}}, LayoutMismatchError, "world_size"),
        ({0: {"world_size": 5}}, LayoutMismatchError, "world_size"),
        (
            {r: {"sites": (make_site("layer.0", dtype="bfloat16" if r == 3 else "float32"),)} for r in range(4)},
            CatalogueConflictError,
            "rank 3 define activation layer.0 differently: dtype",
        ),
        ({0: {"sinks": (Stubborn(),)}}, SinkUnavailableError, "holds a socket"),
        ({0: {"sinks": ("no sink",)}}, ConfigurationError, "is no sink"),
    ],
    ids=["grid", "resume-step", "cadence", "world", "world-of-rank-zero", "site", "sink-in-use", "no-sink"],
)
def test_ranks_that_differ_are_refused_by_name(name, tmp_path, changes, expected, text):
    for error in refused(name, tmp_path / "run", changes=changes, deadlines=Deadlines(attach_s=2)):
        assert type(error) is expected
        assert text in str(error)


def test_a_rank_that_never_comes_is_named_on_all_that_came(name, tmp_path):
    for error in refused(name, tmp_path / "run", deadlines=Deadlines(attach_s=0.5), absent={2}):
        assert type(error) is AttachTimeoutError
        assert set(error.failures) == {2}
        assert "attach_s" in error.remedy


def test_several_ranks_without_a_process_group_or_an_attempt_are_refused(cluster, name, tmp_path):
    with pytest.raises(ProcessGroupMissingError, match="init_process_group"):
        Rank(0, 2, name, str(tmp_path), None).attach()


def test_the_actor_takes_no_gpu_and_no_cpu_and_ends_when_all_have_their_report(cluster, name, tmp_path):
    ranks = world(2, name, tmp_path / "run")
    before = ray.available_resources()["CPU"]
    in_parallel([rank.attach for rank in ranks])
    assert ray.available_resources()["CPU"] == before
    assert (status_of(name).state, status_of(name).num_joined) == ("merging", 2)
    in_parallel([rank.close for rank in ranks])
    wait_until(lambda: read_status(f"ray://{name}") == [])


def test_an_actor_of_another_attempt_is_neither_joined_nor_ended(cluster, name, tmp_path):
    left_over = world(2, name, tmp_path / "first", "left-over")
    in_parallel([rank.attach for rank in left_over])
    pid = status_of(name).pid
    ranks = world(2, name, tmp_path / "second", "new")
    replies = in_parallel([rank.attach for rank in ranks])
    assert replies[0].run_id != left_over[0].reply.run_id
    states = {status.attempt: status for status in read_status(f"ray://{name}")}
    assert states["left-over"].pid == pid
    assert states["new"].pid != pid
    for rank in [*left_over, *ranks]:
        rank.submit(1)
    in_parallel([rank.close for rank in [*left_over, *ranks]])
    for folder in ("first", "second"):
        assert open_history(tmp_path / folder).coverage()["num_ranks"].to_pylist() == [2]


def test_an_actor_whose_ranks_are_gone_closes_the_record_and_ends(cluster, name, tmp_path):
    (rank,) = world(1, name, tmp_path / "run", orphan_s=2.0)
    rank.attach()
    rank.submit(1)
    rank.wait_until_settled()
    # As if the process had died: nothing is heard of it any more.
    rank.aggregator._delivery._next_beat = float("inf")
    rank.aggregator._delivery.put(rank.packet(2))
    wait_until(lambda: read_status(f"ray://{name}") == [], 60)
    segments = open_history(tmp_path / "run").segments().to_pylist()
    assert [(segment["num_commits"], segment["sealed"]) for segment in segments] == [(2, True)]
