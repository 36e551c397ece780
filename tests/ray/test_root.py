"""The root by itself, on an event loop of the test: what it answers when the record or its own memory fails it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import ray

from aggregator import open_history
from aggregator.ray_actor.joining import make_request
from aggregator.ray_actor.ledger import Mark
from aggregator.ray_actor.messages import Joined, State
from aggregator.ray_actor.root import Root
from aggregator.ray_actor.window import Window
from telemetry.errors import RankfoldError, RunDirectoryInUseError
from telemetry.protocol import Deadlines
from tests.collective.worlds import offer
from tests.packets import make_packet

DEADLINES = Deadlines(attach_s=10, merge_s=10, close_s=4)


def run(body):
    asyncio.run(asyncio.wait_for(body(), 30))


def make_root(attempt="attempt", **options):
    return Root(Mark("exp1", attempt), 16, pickle_charter=ray.cloudpickle.dumps, **options)


async def joined(root, path, world_size=2, deadlines=DEADLINES, **changes):
    """Let all ranks come; return the requests that they would join again with."""
    requests = [make_request(offer(r, world_size, deadlines, to=str(path), **changes), "n") for r in range(world_size)]
    answers = await asyncio.gather(*(root.join(request) for request in requests))
    assert all(isinstance(answer, Joined) for answer in answers), answers
    return [replace(q, charter=a.charter, is_agreed=True) for q, a in zip(requests, answers, strict=True)], answers[0]


def data(reply, rank, step):
    packet = make_packet(rank, 2, step, {"a": [1.0]})
    return replace(packet, run_id=reply.run_id, segment=reply.segment).to_bytes()


async def deliver(root, reply, step, ranks=(0, 1), previous=None):
    return await asyncio.gather(*(root.deliver(data(reply, rank, step), previous) for rank in ranks))


def test_a_directory_in_use_is_refused_on_all_and_stays_as_it_was(tmp_path):
    async def body():
        first = make_root()
        _, joined_to = await joined(first, tmp_path / "run")
        await deliver(first, joined_to.reply, 1)
        await asyncio.gather(first.close(0, (0, 1), 0), first.close(1, (0, 1), 0))
        late = await first.join(make_request(offer(0, 2, DEADLINES, to=str(tmp_path / "other")), "n"))
        assert "has closed its record" in str(late.error)
        second = make_root("another")
        offers = [offer(rank, 2, DEADLINES, to=str(tmp_path / "run")) for rank in range(2)]
        for answer in await asyncio.gather(*(second.join(make_request(one, "n")) for one in offers)):
            assert type(answer.error) is RunDirectoryInUseError
            assert "resume_step" in answer.error.remedy

    run(body)
    assert open_history(tmp_path / "run").steps().column("step").to_pylist() == [1]


@pytest.mark.parametrize("sinks", [(), ("no sink",)], ids=["plain", "with-what-would-be-refused"])
def test_one_disabled_rank_turns_all_off_refuses_nothing_and_the_run_says_who(tmp_path, sinks):
    async def body():
        root = make_root()
        offers = [
            offer(0, 2, DEADLINES, to=str(tmp_path / "run"), sinks=sinks),
            offer(1, 2, DEADLINES, to=str(tmp_path / "run"), disabled_by=(1,)),
        ]
        answers = await asyncio.gather(*(root.join(make_request(one, "n")) for one in offers))
        assert [answer.reply.disabled_by for answer in answers] == [(1,), (1,)]
        reports = await asyncio.gather(root.close(0, None, 0), root.close(1, None, 0))
        assert [report["failure"] for report in reports] == [None, None]

    run(body)
    history = open_history(tmp_path / "run")
    assert history.manifest["run"]["disabled_by"] == [1]
    assert history.steps().num_rows == 0


def test_a_root_that_knows_nothing_sends_ranks_back_to_join_and_then_goes_on_where_the_record_is(tmp_path):
    async def body():
        first = make_root()
        requests, joined_to = await joined(first, tmp_path / "run")
        assert {r.state for r in await deliver(first, joined_to.reply, 1)} == {State.DURABLE}

        second = make_root()
        assert (await deliver(second, joined_to.reply, 2, ranks=(0,)))[0].state is State.UNKNOWN
        assert await second.close(0, (0, 1), 0) is None
        assert await second.beat(0) == ""
        # One rank is enough to open the record again; the other is unknown until it has come itself.
        again = await second.join(requests[1])
        assert (again.reply, again.incarnation != joined_to.incarnation) == (joined_to.reply, True)
        assert (await deliver(second, joined_to.reply, 1, ranks=(0,)))[0].state is State.UNKNOWN
        await second.join(requests[0])
        assert {r.state for r in await deliver(second, joined_to.reply, 1)} == {State.DURABLE}
        assert {r.state for r in await deliver(second, joined_to.reply, 2)} == {State.DURABLE}
        reports = await asyncio.gather(second.close(0, (0, 2), 0), second.close(1, (0, 2), 3))
        assert reports[0] == reports[1]
        assert (reports[0]["num_committed"], reports[0]["num_abstained"], reports[0]["failure"]) == (2, 3, None)

    run(body)
    assert open_history(tmp_path / "run").coverage()["num_ranks"].to_pylist() == [2, 2]


def test_a_record_that_cannot_be_written_stops_all_ranks_and_keeps_what_is_durable(tmp_path, monkeypatch):
    async def body():
        root = make_root()
        _, joined_to = await joined(root, tmp_path / "run")
        await deliver(root, joined_to.reply, 1)

        def full(*args, **options):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("aggregator.history.writer.publish", full)
        receipts = await deliver(root, joined_to.reply, 2)
        assert [(r.state, r.error.code) for r in receipts] == [(State.STOPPED, "history_write_failed")] * 2
        assert (await deliver(root, joined_to.reply, 3, ranks=(1,)))[0].state is State.STOPPED
        report = (await asyncio.gather(root.close(0, (0, 3), 0), root.close(1, (0, 3), 0)))[0]
        assert report["num_committed"] == 1
        assert RankfoldError.from_wire(report["failure"]).code == "history_write_failed"

    run(body)
    assert open_history(tmp_path / "run").steps().column("step").to_pylist() == [1]


def test_a_packet_of_another_run_or_grid_stops_its_sender_alone(tmp_path):
    async def body():
        root = make_root()
        _, joined_to = await joined(root, tmp_path / "run")
        stranger = replace(make_packet(0, 2, 1, {"a": [1.0]}), run_id="another")
        receipt = await root.deliver(stranger.to_bytes(), None)
        assert (receipt.state, receipt.error.code) == (State.STOPPED, "packet_malformed")
        assert {r.state for r in await deliver(root, joined_to.reply, 1)} == {State.DURABLE}

    run(body)


def test_an_attempt_that_is_ended_closes_its_record_with_what_was_there(tmp_path):
    async def body():
        ended = asyncio.Event()
        root = make_root(end_process=ended.set)
        _, joined_to = await joined(root, tmp_path / "run")
        pending = asyncio.ensure_future(root.deliver(data(joined_to.reply, 0, 1), None))
        await asyncio.sleep(0.05)
        report = await root.end("ranks 1 failed with RuntimeError")
        assert RankfoldError.from_wire(report["failure"]).code == "peer_lost"
        assert (report["num_committed"], report["num_partial"]) == (1, 1)
        assert (await pending).state is State.DURABLE
        await ended.wait()

    run(body)
    assert open_history(tmp_path / "run").segments().column("sealed").to_pylist() == [True]


def test_an_error_of_our_own_is_told_to_all_who_wait_and_ends_the_process(tmp_path, monkeypatch):
    async def body():
        ended = asyncio.Event()
        root = make_root(end_process=ended.set)
        _, joined_to = await joined(root, tmp_path / "run")

        def broken(self, now):
            raise ZeroDivisionError("nobody foresaw this")

        monkeypatch.setattr(Window, "pop_due", broken)
        for receipt in await deliver(root, joined_to.reply, 1):
            assert receipt.state is State.STOPPED
            assert "ZeroDivisionError: nobody foresaw this" in str(receipt.error)
        report = await root.close(0, (0, 1), 0)
        assert "nobody foresaw this" in report["failure"]["message"]
        await asyncio.gather(root.farewell(0), root.farewell(1))
        await ended.wait()

    run(body)


def test_a_rank_that_hangs_at_the_end_is_named_within_half_of_the_deadline(tmp_path):
    async def body():
        root = make_root()
        _, joined_to = await joined(root, tmp_path / "run")
        await deliver(root, joined_to.reply, 1)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        report = await root.close(0, (0, 1), 0)
        assert 0.4 * DEADLINES.close_s < loop.time() - begun < DEADLINES.close_s
        assert report["missing_ranks"] == (1,)
        assert RankfoldError.from_wire(report["failure"]).failures == {1: "did not close"}

    run(body)
