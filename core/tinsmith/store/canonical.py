"""The canonical form of operations, by which a repeat is recognised. Upgrades must not change it.

It is the client's request as MessagePack: the dataclasses without fields that are `operations.ADDED`, with each
array as its dtype, its shape and its bytes. It is passed on in
parts, and large arrays as views: as a whole it would take the memory of the operation once more.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import msgspec
import numpy as np

Add = Callable[[bytes | memoryview], object]

_ARRAY: Final = (0x90, 0xDC, 0xDD)  # MessagePack's marks: for fewer than 16 items, 2 bytes of length, 4 bytes
_MAP: Final = (0x80, 0xDE, 0xDF)
_ENCODER: Final = msgspec.msgpack.Encoder()


def add_canonical(value: object, add: Add) -> None:
    """Call `add` with the parts of the form, in order."""
    if is_dataclass(value):
        sent = (field.name for field in fields(value) if field.metadata.get("sent", True))
        content = {name: getattr(value, name) for name in sent}
        add_canonical(content, add)
    elif isinstance(value, Mapping):
        add(_mark(_MAP, len(value)))
        for key, each in value.items():
            add(_ENCODER.encode(key))
            add_canonical(each, add)
    elif isinstance(value, tuple | list):
        add(_mark(_ARRAY, len(value)))
        for each in value:
            add_canonical(each, add)
    elif isinstance(value, np.ndarray):
        _add_array(value, add)
    else:
        add(_ENCODER.encode(value))


def _add_array(array: np.ndarray[Any, Any], add: Add) -> None:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    add(_mark(_ARRAY, 3) + _ENCODER.encode(little.dtype.str) + _ENCODER.encode(little.shape))
    add(_mark_of_bytes(little.nbytes))
    add(little.reshape(-1).view(np.uint8).data)


def _mark(marks: tuple[int, int, int], length: int) -> bytes:
    few, many, very_many = marks
    if length < 16:
        return bytes([few | length])
    if length < 1 << 16:
        return bytes([many]) + length.to_bytes(2, "big")
    return bytes([very_many]) + length.to_bytes(4, "big")


def _mark_of_bytes(length: int) -> bytes:
    size = 1 if length < 1 << 8 else 2 if length < 1 << 16 else 4
    return bytes([{1: 0xC4, 2: 0xC5, 4: 0xC6}[size]]) + length.to_bytes(size, "big")
