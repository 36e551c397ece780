"""What travels over a link: a fixed header, then a body of JSON and, for a step, a packet."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from telemetry.errors import PacketMalformedError, PacketVersionError

__all__ = ["HEADER_BYTES", "Frame", "FrameKind", "missing_from_wire", "missing_to_wire", "parse_header"]

_MAGIC: Final = b"RFLK"
_VERSION: Final = 3
_HEADER: Final = struct.Struct("<4sBB2xIQ")
_JSON_LENGTH: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size


class FrameKind(IntEnum):
    """What a frame says, and which way it goes."""

    OFFER = 1
    """Up, at attach: what the ranks of the subtree bring."""
    VERDICT = 2
    """Down, at attach: the run and the segment, or the error that every rank raises."""
    STEP = 3
    """Up: the merged packet of the subtree, and who is missing from it."""
    ACK = 4
    """Down: the step is merged, and which steps are in the record by now; or why merging stops."""
    STOP = 5
    """Both ways, outside of a step: merging stops for this error."""
    CLOSE = 6
    """Up: every rank of the subtree that is left has closed."""
    REPORT = 7
    """Down: the account of the run."""
    END = 8
    """Both ways, last on every link: nothing more will be sent."""
    DURABLE = 9
    """Down: every step that was answered is in the record."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        kind: what it says.
        body: JSON object.
        packet: serialised packet, only with STEP.
        number: of this frame among those that its sender sent over this link, from 0.
    """

    kind: FrameKind
    body: Mapping[str, Any]
    packet: bytes | memoryview = b""
    number: int = 0

    def encode(self) -> tuple[bytes, bytearray]:
        """Return header and payload; the payload is empty if there is nothing to say beyond the kind."""
        if not self.body and not self.packet:
            return self._header(0), bytearray()
        text = json.dumps(self.body, separators=(",", ":")).encode()
        payload = bytearray().join((_JSON_LENGTH.pack(len(text)), text, self.packet))
        return self._header(len(payload)), payload

    def _header(self, num_bytes: int) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, self.kind, self.number, num_bytes)

    @staticmethod
    def decode(kind: FrameKind, number: int, payload: bytes | bytearray | memoryview) -> Frame:
        """Rebuild a frame from its kind, number and payload.

        Raises:
            PacketMalformedError: the payload is cut or no JSON.
        """
        if not payload:
            return Frame(kind, {}, number=number)
        view = memoryview(payload)
        try:
            (length,) = _JSON_LENGTH.unpack(view[: _JSON_LENGTH.size])
            body = json.loads(bytes(view[_JSON_LENGTH.size : _JSON_LENGTH.size + length]))
        except (struct.error, ValueError) as error:
            raise PacketMalformedError(f"the body of a {kind.name} frame cannot be read: {error}") from error
        return Frame(kind, body, view[_JSON_LENGTH.size + length :], number)


def parse_header(header: bytes) -> tuple[FrameKind, int, int]:
    """Return kind, number and payload length of a header of ``HEADER_BYTES`` bytes.

    Raises:
        PacketMalformedError: the bytes are no header.
        PacketVersionError: the peer speaks another version.
    """
    magic, version, kind, number, length = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise PacketMalformedError(f"a frame begins with {magic!r}")
    if version != _VERSION:
        raise PacketVersionError(
            f"a peer speaks version {version} of the link protocol, this process version {_VERSION}",
            remedy="run the same version of Rankfold on every rank",
        )
    try:
        return FrameKind(kind), number, length
    except ValueError as error:
        raise PacketMalformedError(f"a frame has the unknown kind {kind}") from error


def missing_to_wire(missing: Mapping[int, str]) -> list[list[Any]]:
    """Group rank → reason by reason, because a lost subtree shares one."""
    grouped: dict[str, list[int]] = {}
    for rank, reason in sorted(missing.items()):
        grouped.setdefault(reason, []).append(rank)
    return [[reason, ranks] for reason, ranks in grouped.items()]


def missing_from_wire(wire: list[list[Any]]) -> dict[int, str]:
    """Undo :func:`missing_to_wire`."""
    return {rank: reason for reason, ranks in wire for rank in ranks}
