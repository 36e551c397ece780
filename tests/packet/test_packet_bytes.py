"""Packets cross process borders as versioned bytes; damage is refused by name, never read as numbers."""

from __future__ import annotations

import json
import struct
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.merge import merge_packets
from telemetry.errors import PacketMalformedError, PacketVersionError
from telemetry.packet import PACKET_VERSION, Packet, StepFacts
from telemetry.replicas import ReplicaTable
from tests.packets import make_packet

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
VALUES = st.dictionaries(st.text(max_size=12), st.lists(FLOATS, max_size=5), max_size=4)


def _full_packet():
    a = make_packet(0, 4, 9, {"a": [1.0, float("nan")], "b": []}, absent={"c": "hook raised"}, histograms=True)
    b = make_packet(3, 4, 9, {"a": [-5.0]}, facts=StepFacts(grad_scale=65536.0, mode="eval")).abstaining("over budget")
    return replace(merge_packets([a, b]), findings=({"code": "drift", "message": "ä"},))


def _assert_equal(a, b):
    for field in fields(a):
        mine, theirs = getattr(a, field.name), getattr(b, field.name)
        if isinstance(mine, ReplicaTable):
            _assert_equal(mine, theirs)
        elif isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
        else:
            assert mine == theirs, field.name


def test_a_full_packet_survives_the_bytes():
    packet = _full_packet()
    _assert_equal(packet, Packet.from_bytes(packet.to_bytes()))


@given(VALUES, st.booleans())
def test_any_packet_survives_the_bytes(values, histograms):
    packet = make_packet(2, 4, 1, values, histograms=histograms)
    _assert_equal(packet, Packet.from_bytes(memoryview(packet.to_bytes())))


def test_the_same_packet_gives_the_same_bytes():
    assert _full_packet().to_bytes() == _full_packet().to_bytes()


def test_a_merged_packet_of_a_large_world_has_a_short_header():
    packet = replace(make_packet(0, 100_000), ranks=tuple(range(100_000)))
    assert len(packet.to_bytes()) < 2000
    assert Packet.from_bytes(packet.to_bytes()).ranks == packet.ranks


@given(st.integers(0, 10_000))
def test_bytes_cut_anywhere_are_refused(position):
    data = _full_packet().to_bytes()
    with pytest.raises(PacketMalformedError):
        Packet.from_bytes(data[: position % len(data)])


def test_bytes_that_follow_a_packet_are_refused():
    with pytest.raises(PacketMalformedError, match="follow the last column"):
        Packet.from_bytes(_full_packet().to_bytes() + b"\0")


def test_another_magic_word_is_refused():
    data = bytearray(_full_packet().to_bytes())
    data[0] ^= 1
    with pytest.raises(PacketMalformedError, match="do not begin as a packet"):
        Packet.from_bytes(bytes(data))


def test_another_version_is_refused_with_both_numbers():
    data = bytearray(_full_packet().to_bytes())
    struct.pack_into("<H", data, 4, PACKET_VERSION + 1)
    with pytest.raises(PacketVersionError, match=f"version {PACKET_VERSION + 1}.*version {PACKET_VERSION}") as caught:
        Packet.from_bytes(bytes(data))
    assert "same version" in caught.value.remedy


@pytest.mark.parametrize("lost", ["run_id", "step", "descriptor", "num_rows", "facts"])
def test_a_header_that_lacks_a_field_is_refused(lost):
    data = _full_packet().to_bytes()
    magic, version, length = struct.unpack("<4sHI", data[:10])
    header = json.loads(data[10 : 10 + length])
    del header[lost]
    text = json.dumps(header).encode()
    with pytest.raises(PacketMalformedError):
        Packet.from_bytes(struct.pack("<4sHI", magic, version, len(text)) + text + data[10 + length :])


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe"])
def test_a_header_that_is_no_json_object_is_refused(text):
    with pytest.raises(PacketMalformedError):
        Packet.from_bytes(struct.pack("<4sHI", b"RFPK", PACKET_VERSION, len(text)) + text)


def test_an_abstaining_packet_keeps_its_definitions_and_nothing_else():
    packet = make_packet(1, 4, 2, {"a": [1.0]}, histograms=True)
    empty = packet.abstaining("too many steps in flight")
    assert empty.num_rows == len(empty.hist_sites) == 0
    assert empty.definitions == packet.definitions
    assert empty.abstained == {1: "too many steps in flight"}
    assert len(empty.to_bytes()) < 1000
