"""The nodes of a job agree on its name and number their attempts alike, whoever came late or was replaced."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from aggregator.history import HistoryWriter
from aggregator.testing.packets import make_step
from launch.rendezvous import Attempt, AttemptRendezvous, agree
from telemetry.errors import ConfigurationError
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.history.history_processes import packet_of


class RoundStore:
    """The store of one round: a read waits for the key, as that of torchrun does."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.keys[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.keys, timeout=20), f"nobody wrote {key}"
            return self.keys[key]


class Rounds:
    """Stands in for torchrun's own rendezvous: hands out the place in a round that the test decided on."""

    def __init__(self) -> None:
        self.next: RendezvousInfo | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        assert self.next is not None
        return self.next


class Node:
    """The agent of one node, with an environment of its own."""

    def __init__(self, **environ: str) -> None:
        self.environ = environ
        self.rounds = Rounds()
        self.handler = AttemptRendezvous(self.rounds, self.environ)


def meet(*nodes: Node) -> list[tuple[str, str, str]]:
    """Let the nodes meet in this order in a new round; return what each tells its ranks."""
    store = RoundStore()
    for place, node in enumerate(nodes):
        node.rounds.next = RendezvousInfo(store, place, len(nodes), None)
    with ThreadPoolExecutor(len(nodes)) as pool:
        for waiting in [pool.submit(node.handler.next_rendezvous) for node in nodes]:
            waiting.result(30)
    names = ("RANKFOLD_JOB", "RANKFOLD_ATTEMPT", "RANKFOLD_NONCE")
    return [tuple(node.environ[name] for name in names) for node in nodes]


def test_all_nodes_tell_their_ranks_the_same_and_every_attempt_differs():
    nodes = [Node() for _ in range(3)]
    rounds = [meet(*nodes) for _ in range(3)]
    assert all(len(set(told)) == 1 for told in rounds)
    assert len({told[0][0] for told in rounds}) == 1
    assert [told[0][1] for told in rounds] == ["0", "1", "2"]
    assert len({told[0][2] for told in rounds}) == 3


def test_the_count_goes_on_where_the_first_node_is_replaced_by_one_that_knows_nothing():
    first, second = Node(), Node()
    before = meet(first, second)
    meet(first, second)
    after = meet(Node(), second)
    assert len(set(after)) == 1
    assert (after[0][0], after[0][1]) == (before[0][0], "2")


def test_two_jobs_that_nobody_named_have_different_names():
    assert meet(Node())[0][0] != meet(Node())[0][0]


def test_a_name_that_was_given_is_kept():
    assert {told[0] for told in meet(Node(RANKFOLD_JOB="exp1"), Node(RANKFOLD_JOB="exp1"))} == {"exp1"}


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"RANKFOLD_JOB": "a"}, {"RANKFOLD_JOB": "b"}, "--job: a on node 0, b on node 1"),
        ({"RANKFOLD_TO": "runs/x"}, {}, "--to: runs/x on node 0, none on node 1"),
    ],
)
def test_nodes_that_were_started_differently_all_refuse_and_say_who_has_what(one, other, named):
    store = RoundStore()

    def join(place: int, environ: dict[str, str]) -> Attempt:
        job, to = environ.get("RANKFOLD_JOB", ""), environ.get("RANKFOLD_TO", "")
        return agree(store, place, 2, job=job, to=to, last=-1, find_last=lambda _: -1)

    with ThreadPoolExecutor(2) as pool:
        for waiting in [pool.submit(join, place, environ) for place, environ in enumerate((one, other))]:
            with pytest.raises(ConfigurationError) as caught:
                waiting.result(30)
            assert named in str(caught.value)


def record_attempt(run, told, monkeypatch, *steps):
    for name, value in zip(("RANKFOLD_JOB", "RANKFOLD_ATTEMPT", "RANKFOLD_NONCE"), told, strict=True):
        monkeypatch.setenv(name, value)
    writer = HistoryWriter.create(run, {}, DEFAULT_DESCRIPTOR)
    for step in steps:
        writer.commit(make_step(packet_of(step)))
    writer.abandon()
    return writer.segment


def test_a_named_job_that_lost_all_its_agents_numbers_on_from_its_record(tmp_path, monkeypatch):
    run = tmp_path / "run"
    environ = {"RANKFOLD_JOB": "exp1", "RANKFOLD_TO": str(run)}
    assert record_attempt(run, meet(Node(**environ))[0], monkeypatch, 1, 2) == 0
    again = meet(Node(**environ))[0]
    assert again[1] == "1"
    assert record_attempt(run, again, monkeypatch, 1) == 1


def test_a_job_of_another_name_does_not_number_on_from_that_record(tmp_path, monkeypatch):
    run = tmp_path / "run"
    record_attempt(run, meet(Node(RANKFOLD_JOB="exp1", RANKFOLD_TO=str(run)))[0], monkeypatch, 1)
    assert meet(Node(RANKFOLD_JOB="exp2", RANKFOLD_TO=str(run)))[0][1] == "0"


def test_torchrun_finds_the_rendezvous_under_its_name(monkeypatch):
    names = ("RANKFOLD_JOB", "RANKFOLD_ATTEMPT", "RANKFOLD_NONCE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    for name in names:
        monkeypatch.setenv(name, "")
    assert [found.value for found in entry_points(group="torchrun.handlers") if found.name == "rankfold"] == [
        "launch.rendezvous:plugin"
    ]
    handler = get_rendezvous_handler(RendezvousParameters("rankfold", "localhost:0", "some-id", 1, 1))
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("rankfold", "some-id", False)
    assert handler.next_rendezvous().world_size == 1
    assert not handler.is_closed()
    handler.shutdown()


class SilentStore(Rounds):
    """A rendezvous whose store does not answer until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = threading.Event()
        self.num_asked = 0
        self.error: Exception | None = None

    def num_nodes_waiting(self) -> int:
        self.num_asked += 1
        assert self.answer.wait(30)
        if self.error is not None:
            raise self.error
        return 1

    def shutdown(self) -> bool:
        assert self.answer.wait(30)
        return True


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr("launch.rendezvous._ANSWER_S", 0.05)
    monkeypatch.setattr("launch.rendezvous._GOODBYE_S", 0.05)
    store = SilentStore()
    yield store
    store.answer.set()


def test_a_store_that_does_not_answer_is_asked_once_and_keeps_the_agent_from_nothing(silent):
    handler = AttemptRendezvous(silent, {})
    assert [handler.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    assert silent.num_asked == 1
    assert handler.shutdown() is False
    silent.answer.set()
    assert handler._asked is not None
    handler._asked.result(10)
    assert handler.num_nodes_waiting() == 1


def test_a_store_that_is_lost_is_not_asked_again_and_the_next_attempt_says_so(silent, caplog):
    silent.error = RendezvousConnectionError("the connection has failed")
    silent.answer.set()
    handler = AttemptRendezvous(silent, {})
    assert [handler.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    assert silent.num_asked == 1
    assert "no node can join" in caplog.text
    assert handler.shutdown() is False
    with pytest.raises(RendezvousConnectionError, match="start this node again"):
        handler.next_rendezvous()
