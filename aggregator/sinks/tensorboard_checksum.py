"""TensorBoard's event files, checksummed in C where google-crc32c is installed.

TensorBoard computes the CRC-32C of every record in Python, a byte at a time, while it holds the interpreter: half a
second of CPU for the histograms of 500 sites. The bytes that are written are the same either way.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["speed_up"]


def speed_up(writer: SummaryWriter) -> bool:
    """Let an open writer compute its checksums in C.

    Returns:
        Whether it does. Without google-crc32c, and with a TensorBoard that is built in a way not known here, the writer
        stays as it is.
    """
    try:
        import google_crc32c
    except ImportError:
        return False
    records = _record_writer(writer)
    file = getattr(records, "_writer", None)
    if google_crc32c.implementation != "c" or file is None:
        return False

    def write(data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        checksums = [_masked(google_crc32c.value(part)) for part in (length, data)]
        file.write(length + checksums[0] + data + checksums[1])

    # On this one object, which TensorBoard's thread holds already; the class is everybody's.
    records.write = write
    return True


def _record_writer(writer: SummaryWriter) -> Any:
    """Return what writes the records of the file, None where it is not found."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    event_writer: Any = getattr(writer.file_writer, "event_writer", None)
    records = getattr(getattr(event_writer, "_async_writer", None), "_writer", None)
    return records if type(records) is RecordWriter else None


def _masked(checksum: int) -> bytes:
    # The format of the records rotates a checksum and adds a constant.
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)
