"""Reads protobuf messages on the wire: checks that a parser does not make, and which request a refused body is.

- How many elements it has. An empty message takes two bytes on the wire and hundreds in memory, so a body's size alone
  bounds neither memory nor time.
- Whether all of it is known: a parser skips what is not. Fields that hold nothing are skipped here, too; see
  `unknown_fields.py` for the reason.
- Whether each field has one value: a parser takes the last of several.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Final, NamedTuple

import orjson
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tinsmith.errors import UserError
from tinsmith.protocol.unknown_fields import UnknownField, unknown

MAX_ELEMENTS: Final = 1 << 18
"""A datum with one chunk and three tensors has 25; the SDK sends at most 1,024 data in a request."""

_VARINT: Final = 0
_BYTES: Final = 2
_SIZES: Final = {1: 8, 5: 4}
"""Of values of the other wire types. A group is none, which no message of the API has."""
_FORMS: Final = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 1),
    **dict.fromkeys((FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE), _BYTES),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 5),
}
"""The wire types of all but varints."""
_SHOWN_BYTES: Final = 16
_SHOWN_CHARS: Final = 100
_LONG: Final = 0x80
_MAX_SHIFT: Final = 63
_MODEL_ID: Final = 1 << 3 | _BYTES  # the keys of ForwardBackwardRequest's first fields, and of forward_only
_SEQ_ID: Final = 2 << 3 | _VARINT
_FORWARD_ONLY: Final = 6 << 3 | _VARINT
_MAX_FIELDS: Final = 2048  # that are looked at; the SDK sends at most 1,024 data in a request
_MAX_JSON_BYTES: Final = 1 << 20  # only passes in JSON may be larger; reading those again would hold up all others


class _Field(NamedTuple):
    """The field that a key on the wire, a number and a wire type, stands for."""

    inner: Descriptor | None = None  # of a message
    is_packed: bool = False


def check_elements(body: bytes, descriptor: Descriptor) -> None:
    """Raise DecodeError if it is no protobuf message, UserError for more than MAX_ELEMENTS fields at any depth.

    A packed list counts as many more as it has bytes. Raises UnknownFieldError for an unknown field that holds
    something.
    """
    _check(body, 0, len(body), descriptor, 0)


def check_no_value_is_lost(wire: bytes | memoryview, parsed: Message) -> None:
    """Raise UserError if some of the message was lost when it was parsed: several values of one field.

    A parsed message is never shorter than what it was parsed from, unless that happened, or its encoder wasted bytes.
    """
    if parsed.ByteSize() < len(wire):
        _check_no_value_is_lost(bytes(wire), parsed.DESCRIPTOR)


def split_off(number: int, body: bytes) -> tuple[bytes, list[memoryview]]:
    """Return a message without its field of that number, and the values of that field. The field holds messages."""
    whole, rest, values, before = memoryview(body), list[memoryview](), list[memoryview](), 0
    for key, start, end in _fields_in(body):
        if key == number << 3 | _BYTES:
            values.append(whole[start:end])
        else:
            rest.append(whole[before:end])
        before = end
    return b"".join(rest), values


def _check(body: bytes, at: int, end: int, message: Descriptor, elements: int) -> int:
    """Return the number of elements plus this message's."""
    fields = _fields(message)
    while at < end:
        key, value_at = (body[at], at + 1) if body[at] < _LONG else _varint(body, at, end)
        start, at = _value(key & 7, body, value_at, end)
        elements += 1
        if key not in fields:
            if key >> 3 == 0:  # no field has that number
                raise _damaged(start)
            _refuse_unknown(message, key, body[value_at:at])
        else:
            inner, is_packed = fields[key]
            if inner is not None:
                elements = _check(body, start, at, inner, elements)
            elif is_packed:
                elements += at - start
        if elements > MAX_ELEMENTS:
            msg = f"the body has more than {MAX_ELEMENTS} fields, chunks and tensors; send fewer data at a time"
            raise UserError(msg)
    return elements


def _refuse_unknown(message: Descriptor, key: int, value: bytes) -> None:
    """Raise UnknownFieldError unless the value is 0 or empty; before bytes comes their length."""
    if not any(value) or (key & 7 == _VARINT and _varint(value, 0, len(value))[0] == 0):
        return
    number, known = key >> 3, (f"{field.number} ({field.name})" for field in message.fields)
    shown = value.hex() if len(value) <= _SHOWN_BYTES else f"{value[:_SHOWN_BYTES].hex()}... of {len(value)} bytes"
    raise unknown(UnknownField(message.name, str(number)), f"field {number} of {message.name} ({shown})", allowed=known)


def _check_no_value_is_lost(body: bytes, message: Descriptor) -> None:
    fields, taken = _fields(message), set[str]()
    for key, start, end in _fields_in(body):
        if key not in fields:
            continue
        target, inner = _target(message.fields_by_number[key >> 3], body[start:end]), fields[key].inner
        if target in taken:
            name = target[:_SHOWN_CHARS]
            msg = f"{message.name}: {name} is given more than once, and the last would count; send one"
            raise UserError(msg)
        if target:
            taken.add(target)
        if inner is not None:
            _check_no_value_is_lost(body[start:end], inner)


def _target(field: FieldDescriptor, value: bytes) -> str:
    """Return the name that a field sets; "" if it adds to a list. Fields that exclude each other set the same name."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return f"{field.name} {GetMessageClass(field.message_type).FromString(value).key!r}"
    if field.is_repeated:
        return ""
    exclusive = field.containing_oneof.fields if field.containing_oneof is not None else (field,)
    return " or ".join(each.name for each in exclusive)


@cache
def _fields(message: Descriptor) -> dict[int, _Field]:
    """Return the fields of a message by their keys. A list of numbers may be packed."""
    found: dict[int, _Field] = {}
    for field in message.fields:
        form = _FORMS.get(field.type, _VARINT)
        found[field.number << 3 | form] = _Field(field.message_type)
        if field.is_repeated and form != _BYTES:
            found[field.number << 3 | _BYTES] = _Field(is_packed=True)
    return found


def _fields_in(body: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the key of each field, and where its value starts and ends. Raises DecodeError where one is damaged."""
    at = 0
    while at < len(body):
        key, at = _varint(body, at, len(body))
        start, at = _value(key & 7, body, at, len(body))
        yield key, start, at


def _value(form: int, body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return where the value of this wire type starts, and where it ends."""
    if form == _BYTES:  # or text, a message, a packed list
        length, start = _varint(body, at, end)
        stop = start + length
    elif form == _VARINT:
        start, stop = at, _varint(body, at, end)[1]
    elif form in _SIZES:
        start, stop = at, at + _SIZES[form]
    else:
        raise _damaged(at)
    if stop > end:
        raise _damaged(start)
    return start, stop


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number and the position after it."""
    if at < end and body[at] < _LONG:  # as most are
        return body[at], at + 1
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
    return DecodeError(f"the field at byte {at} is cut off or unknown")


# Which request a refused body is. It may be too large, cut off, damaged or of the wrong form -------------------------


def address_of(body: bytes) -> tuple[str, int] | None:
    """Return `(model_id, seq_id)`, or None if the body does not state both.

    JSON must be complete. Of a protobuf the beginning is enough, since its fields come in the order of their numbers.
    """
    try:
        model_id, seq_id = _in_json(body) if body.startswith(b"{") else _in_protobuf(body)
    except (ValueError, DecodeError):
        return None
    return (model_id, seq_id) if model_id.isprintable() and 1 <= seq_id < 2**31 else None


def asks_forward_only(body: bytes) -> bool:
    """Return whether a ForwardBackwardRequest says that it changes no gradient, as far as it can be read."""
    with suppress(DecodeError, ValueError):
        if body.startswith(b"{"):
            return len(body) <= _MAX_JSON_BYTES and orjson.loads(body).get("forward_only") is True
        for key, start, end in islice(_fields_in(body), _MAX_FIELDS):
            if key == _FORWARD_ONLY:
                return _varint(body, start, end)[0] != 0
    return False


def _in_json(body: bytes) -> tuple[str, int]:
    """Raises ValueError if they are not there."""
    fields = orjson.loads(body) if len(body) <= _MAX_JSON_BYTES else {}
    model_id, seq_id = fields.get("model_id"), fields.get("seq_id")
    if not isinstance(model_id, str) or type(seq_id) is not int:
        raise ValueError
    return model_id, seq_id


def _in_protobuf(body: bytes) -> tuple[str, int]:
    """Raises ValueError or DecodeError if they are not there."""
    found = list(islice(_fields_in(body), 2))
    if [key for key, _, _ in found] != [_MODEL_ID, _SEQ_ID]:
        raise ValueError
    (_, start, end), (_, seq_start, seq_end) = found
    return body[start:end].decode("ascii"), _varint(body, seq_start, seq_end)[0]
