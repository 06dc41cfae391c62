"""How many parts a protobuf message has, counted on the wire before anything is built from it.

An empty message takes two bytes on the wire and hundreds in memory, so a body's size alone bounds neither memory nor
time.
"""

from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from tinsmith.errors import UserError

MAX_PARTS: Final = 1 << 18
"""A datum with one chunk and three tensors has 25; the SDK sends at most 1,024 data in a request."""

_BYTES: Final = 2
_MAX_SHIFT: Final = 63


def check_parts(body: bytes, descriptor: Descriptor) -> None:
    """Raise UserError for more than MAX_PARTS fields, at any depth, and DecodeError for what is no protobuf message.

    A packed list counts as many more as it has bytes.
    """
    _count(body, 0, len(body), descriptor, 0)


def split_off(number: int, body: bytes) -> tuple[bytes, list[memoryview]]:
    """Return a message without its field of that number, and the values of that field. The field holds messages."""
    whole, rest, values, at = memoryview(body), list[memoryview](), list[memoryview](), 0
    while at < len(body):
        start = at
        key, at = _varint(body, at, len(body))
        length, at = _length(key & 7, body, at, len(body))
        if key == number << 3 | _BYTES:
            values.append(whole[at : at + length])
        else:
            rest.append(whole[start : at + length])
        at += length
    return b"".join(rest), values


def _count(body: bytes, at: int, end: int, message: Descriptor, parts: int) -> int:
    """Return the number of parts with those of this message added."""
    fields = _fields(message)
    while at < end:
        key, at = _varint(body, at, end)
        number, form = key >> 3, key & 7
        length, at = _length(form, body, at, end)
        parts += 1
        if form == _BYTES and length > 0 and number in fields:
            inner = fields[number]
            parts = parts + length if inner is None else _count(body, at, at + length, inner, parts)
        if parts > MAX_PARTS:
            msg = f"the body has more than {MAX_PARTS} fields, chunks and tensors; send fewer data at a time"
            raise UserError(msg)
        at += length
    return parts


@cache
def _fields(message: Descriptor) -> dict[int, Descriptor | None]:
    """Return the messages in a message by their field number, and None for packed lists."""
    found: dict[int, Descriptor | None] = {}
    for field in message.fields:
        if field.message_type is not None:
            found[field.number] = field.message_type
        elif field.is_repeated and field.type not in {FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING}:
            found[field.number] = None
    return found


def _length(form: int, body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return how long the value of this wire type is, and where it starts."""
    match form:
        case 0:  # a varint
            length, start = 0, _varint(body, at, end)[1]
        case 1:  # 64 bits
            length, start = 8, at
        case 2:  # bytes, text, a message or a packed list
            length, start = _varint(body, at, end)
        case 5:  # 32 bits
            length, start = 4, at
        case _:  # a group, which no message of the API has
            raise _damaged(at)
    if start + length > end:
        raise _damaged(at)
    return length, start


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number and the position after it."""
    number, shift = 0, 0
    while at < end and shift <= _MAX_SHIFT:
        byte = body[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise _damaged(at)


def _damaged(at: int) -> DecodeError:
    return DecodeError(f"what comes at byte {at} is cut off or unknown")
