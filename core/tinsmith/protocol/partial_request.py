"""Which request a refused body is. The body may be too large, cut off, damaged or of the wrong form."""

from typing import Final

import orjson

_MODEL_ID: Final = b"\x0a"  # field 1, length-delimited
_SEQ_ID: Final = b"\x10"  # field 2, varint
_FORWARD_ONLY: Final = 0x30  # field 6, varint
_MAX_FIELDS: Final = 2048  # that are looked at; the SDK sends at most 1,024 data in a request
_VALUE_BYTES: Final = {1: 8, 5: 4}  # of the other wire types
_MAX_VARINT_BYTES: Final = 5  # of an int32 that is not negative
_MAX_JSON_BYTES: Final = 1 << 20  # larger requests with a number are protobuf


def address_of(body: bytes) -> tuple[str, int] | None:
    """Return `(model_id, seq_id)`, or None if the body does not state both.

    JSON must be complete. Of a protobuf the beginning is enough, since its fields come in the order of their numbers.
    """
    address = _in_json(body) if body.startswith(b"{") else _in_protobuf(body)
    if address is None or not address[0].isprintable() or not 1 <= address[1] < 2**31:
        return None
    return address


def asks_forward_only(body: bytes) -> bool:
    """Return whether a protobuf ForwardBackwardRequest says that it changes no gradient, as far as it can be read."""
    at = 0
    for _ in range(_MAX_FIELDS):
        key, at = _varint(body, at)
        if at >= len(body):
            return False
        form = key & 7
        if form in (0, 2):
            number, at = _varint(body, at)
            if key == _FORWARD_ONLY:
                return at <= len(body) and number != 0
            at += number if form == 2 else 0
        elif form in _VALUE_BYTES:
            at += _VALUE_BYTES[form]
        else:
            return False
    return False


def _in_json(body: bytes) -> tuple[str, int] | None:
    if len(body) > _MAX_JSON_BYTES:
        return None
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    model_id, seq_id = fields.get("model_id"), fields.get("seq_id")
    return (model_id, seq_id) if isinstance(model_id, str) and type(seq_id) is int else None


def _in_protobuf(start: bytes) -> tuple[str, int] | None:
    if not start.startswith(_MODEL_ID):
        return None
    length, at = _varint(start, 1)
    model_id = start[at : at + length]
    at += length
    if len(model_id) < length or start[at : at + 1] != _SEQ_ID:
        return None
    seq_id, end = _varint(start, at + 1)
    return (model_id.decode(), seq_id) if end <= len(start) and model_id.isascii() else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and the position after it, which is past the data if the number is cut off or too long."""
    number = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    return 0, len(data) + 1
