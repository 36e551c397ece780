"""A relay: most steps go up as one packet, nobody waits long for a straggler, and answers reach whom they concern."""

from __future__ import annotations

import asyncio

from aggregator.ray_actor.messages import Receipt, State
from aggregator.ray_actor.relay import Relay
from telemetry.packet import Packet
from tests.packets import make_packet

DURABLE = Receipt(State.DURABLE)


class Above:
    """Keeps what goes up; answers as told, durable if nothing was."""

    def __init__(self, *answers):
        self.sent = []
        self.answers = list(answers)

    async def __call__(self, data, previous):
        packet = Packet.from_bytes(data)
        self.sent.append((packet.step, packet.ranks, previous))
        answer = self.answers.pop(0) if self.answers else DURABLE
        if isinstance(answer, Exception):
            raise answer
        return answer


def data(rank, step):
    return make_packet(rank, 4, step, {"a": [1.0]}).to_bytes()


def run(body):
    asyncio.run(asyncio.wait_for(body(), 20))


def test_a_step_goes_up_once_when_all_ranks_of_the_relay_have_brought_it():
    async def body():
        above = Above()
        relay = Relay([0, 1, 2], above, linger_s=10)
        answers = await asyncio.gather(*(relay.deliver(data(rank, 2), (0, 1)) for rank in (2, 0, 1)))
        assert answers == [DURABLE] * 3
        assert above.sent == [(2, (0, 1, 2), (0, 1))]

    run(body)


def test_a_straggler_costs_one_linger_and_then_goes_up_by_itself_until_it_keeps_pace_again():
    async def body():
        above = Above()
        relay = Relay([0, 1], above, linger_s=0.2)
        await relay.deliver(data(0, 1), None)
        begun = asyncio.get_running_loop().time()
        await relay.deliver(data(0, 2), (0, 1))
        assert asyncio.get_running_loop().time() - begun < 0.15
        await relay.deliver(data(1, 1), None)
        assert above.sent == [(1, (0,), None), (2, (0,), (0, 1)), (1, (1,), None)]
        await relay.deliver(data(1, 2), (0, 1))
        await asyncio.gather(relay.deliver(data(0, 3), (0, 2)), relay.deliver(data(1, 3), (0, 2)))
        assert above.sent[-1] == (3, (0, 1), (0, 2))

    run(body)


def test_packets_that_cross_what_the_root_holds_go_up_one_by_one():
    async def body():
        above = Above(Receipt(State.CROSSING), Receipt(State.DURABLE), Receipt(State.LATE))
        relay = Relay([0, 1], above, linger_s=10)
        answers = await asyncio.gather(relay.deliver(data(0, 1), None), relay.deliver(data(1, 1), None))
        assert [answer.state for answer in answers] == [State.DURABLE, State.LATE]
        assert [ranks for _, ranks, _ in above.sent] == [(0, 1), (0,), (1,)]

    run(body)


def test_while_the_root_is_away_the_ranks_are_told_to_join_again():
    async def body():
        relay = Relay([0], Above(ConnectionError("the root is being started again")), linger_s=10)
        assert (await relay.deliver(data(0, 1), None)).state is State.UNKNOWN
        assert (await relay.deliver(data(0, 1), None)).state is State.DURABLE

    run(body)


def test_bytes_that_are_no_packet_stop_whoever_sent_them():
    async def body():
        receipt = await Relay([0], Above(), linger_s=10).deliver(b"nonsense", None)
        assert receipt.state is State.STOPPED
        assert receipt.error.code == "packet_malformed"

    run(body)
