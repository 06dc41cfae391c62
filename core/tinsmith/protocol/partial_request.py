"""Whose a forward_backward is, read from a body that cannot be read whole: too large, cut off, or damaged further on.

The first two fields of the message say it, and protobuf writes fields in the order of their numbers.
"""

from typing import Final

_MODEL_ID: Final = b"\x0a"  # field 1, length-delimited
_SEQ_ID: Final = b"\x10"  # field 2, varint
_MAX_VARINT_BYTES: Final = 5  # of an int32 that is not negative


def address_of(start: bytes) -> tuple[str, int] | None:
    """Return `(model_id, seq_id)`, or None where the body does not begin with both."""
    if not start.startswith(_MODEL_ID):
        return None
    length, at = _varint(start, 1)
    model_id = start[at : at + length]
    at += length
    if len(model_id) < length or start[at : at + 1] != _SEQ_ID:
        return None
    seq_id, end = _varint(start, at + 1)
    if end > len(start) or not model_id.isascii() or not 1 <= seq_id < 2**31:
        return None
    return model_id.decode(), seq_id


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and where it ends: behind the data where it is cut off or too long."""
    number = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    return 0, len(data) + 1
