"""How the log stores MessagePack: compressed, with integers cut to the width of their values.

    0x80-0x8f, 0xde, 0xdf ...   plain MessagePack of a map: short values
    0xc1 0x01 ...               a zstd frame of MessagePack; no MessagePack begins with 0xc1; 0x01 is the layout

Once they have the same width, the tokens and targets of a datum are mostly the same bytes, which zstd stores once.
"""

from typing import Any, Final

import numpy as np
import zstandard

_MARK: Final = 0xC1
_ZSTD: Final = 1
_SHORT_BYTES: Final = 256  # compressing less saves nothing
_LEVEL: Final = 1
_NARROW: Final = (1, 2, 3, 4)  # bytes for an integer

StoredArray = tuple[str, tuple[int, ...], bytes] | tuple[str, tuple[int, ...], bytes, int]
"""dtype, shape, little-endian bytes; and, if integers were cut, their width in bytes."""


def compress(packed: bytes) -> bytes:
    """Return the bytes to store for MessagePack."""
    if len(packed) < _SHORT_BYTES:
        return packed
    return bytes((_MARK, _ZSTD)) + zstandard.ZstdCompressor(level=_LEVEL).compress(packed)


def decompress(stored: bytes) -> bytes:
    """Return the MessagePack. Raise ValueError if the bytes are damaged or have an unknown layout."""
    if not stored or stored[0] != _MARK:
        return stored
    if stored[1:2] != bytes((_ZSTD,)):
        msg = f"layout {stored[1] if len(stored) > 1 else 'missing'} is not known; a newer tinsmith may have written it"
        raise ValueError(msg)
    try:
        return zstandard.ZstdDecompressor().decompress(stored[2:])
    except zstandard.ZstdError as error:
        msg = f"the compressed bytes are damaged: {error}"
        raise ValueError(msg) from error


def narrow(array: np.ndarray[Any, Any]) -> StoredArray:
    """Convert an array to its stored form, without loss."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    dtype, shape, size = little.dtype, little.shape, little.dtype.itemsize
    if dtype.kind in "iu" and little.size and little.min() >= 0:
        width = next((each for each in _NARROW if int(little.max()) < 1 << 8 * each), size)
        if width < size:
            cut = little.reshape(-1, 1).view(np.uint8)[:, :width]
            return dtype.str, shape, cut.tobytes(), width
    return dtype.str, shape, little.tobytes()


def widen(stored: StoredArray) -> np.ndarray[Any, Any]:
    """Return the read-only array of a stored form. If integers were not cut, it is a view of the bytes."""
    dtype, shape, data = np.dtype(stored[0]), stored[1], stored[2]
    if len(stored) == 3:
        return np.frombuffer(data, dtype).reshape(shape)
    wide = np.zeros((len(data) // stored[3], dtype.itemsize), np.uint8)
    wide[:, : stored[3]] = np.frombuffer(data, np.uint8).reshape(-1, stored[3])
    array = wide.view(dtype).reshape(shape)
    array.flags.writeable = False
    return array
