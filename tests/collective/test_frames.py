"""Frames and the reports inside of them survive the way over a link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.collective.account import report_from_wire, report_to_wire
from aggregator.collective.frames import (
    HEADER_BYTES,
    Frame,
    FrameKind,
    missing_from_wire,
    missing_to_wire,
    parse_header,
)
from aggregator.collective.order import FrameOrder
from telemetry.errors import MergeDeadlineError, PacketMalformedError, PacketVersionError
from telemetry.protocol import CloseReport, SinkReport

BODIES = st.dictionaries(st.text(max_size=9), st.integers() | st.text(max_size=9) | st.none(), max_size=4)


@given(st.sampled_from(FrameKind), BODIES, st.binary(max_size=50), st.integers(0, 2**32 - 1))
def test_a_frame_survives_its_bytes(kind, body, packet, number):
    header, payload = Frame(kind, body, packet, number).encode()
    assert parse_header(header) == (kind, number, len(payload))
    decoded = Frame.decode(kind, number, payload)
    assert (decoded.kind, decoded.body, bytes(decoded.packet), decoded.number) == (kind, body, packet, number)


def test_a_frame_that_says_only_its_kind_has_no_payload():
    header, payload = Frame(FrameKind.END, {}).encode()
    assert (len(header), len(payload)) == (HEADER_BYTES, 0)


@pytest.mark.parametrize(
    ("position", "error"), [(0, PacketMalformedError), (4, PacketVersionError), (5, PacketMalformedError)]
)
def test_a_damaged_header_is_refused(position, error):
    header = bytearray(Frame(FrameKind.ACK, {"a": 1}).encode()[0])
    header[position] ^= 0x40
    with pytest.raises(error):
        parse_header(bytes(header))


@pytest.mark.parametrize("payload", [b"\0", b"\xff" * 8, b"\2\0\0\0\0\0\0\0{x"])
def test_a_payload_that_cannot_be_read_is_refused(payload):
    with pytest.raises(PacketMalformedError, match="ACK"):
        Frame.decode(FrameKind.ACK, 0, payload)


@given(st.dictionaries(st.integers(0, 100), st.sampled_from(["lost", "late", "left"])))
def test_missing_ranks_survive_being_grouped_by_reason(missing):
    wire = missing_to_wire(missing)
    assert len(wire) <= 3
    assert missing_from_wire(wire) == missing


def test_a_report_survives_the_wire():
    failure = MergeDeadlineError("rank 3 missing", step=7, failures={3: "late"}, remedy="look")
    report = CloseReport(7, 9, 1, 2, (3,), failure, (SinkReport("tb", "late", 5, 1, "slow"),), ({"code": "drift"},))
    copy = report_from_wire(report_to_wire(report))
    assert copy.failure is not None
    assert (type(copy.failure), str(copy.failure), copy.failure.failures) == (
        MergeDeadlineError,
        str(failure),
        {3: "late"},
    )
    assert vars(copy) | {"failure": None} == vars(report) | {"failure": None}


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=8))
def test_frames_are_accepted_in_the_order_of_their_sender_each_once(arrival, repeated):
    order = FrameOrder()
    sent = [Frame(FrameKind.STEP, {"n": n}, number=n) for n in range(8)]
    accepted = [frame for n in (*arrival, *repeated) for frame in order.accept(sent[n])]
    assert accepted == sent


def test_what_was_sent_after_a_lost_frame_is_never_taken_for_it():
    order = FrameOrder()
    assert list(order.accept(Frame(FrameKind.STEP, {}, number=1))) == []
