"""Encoding operations and results: MessagePack of their dataclasses, with arrays as little-endian bytes.

The log stores MessagePack compressed, with integers cut to the width of their values:

    0x80-0x8f, 0xde, 0xdf ...   plain MessagePack of a map: short values
    0xc1 0x01 ...               a zstd frame of MessagePack; no MessagePack begins with 0xc1; 0x01 is the layout

Once they have the same width, the tokens and targets of a datum are mostly the same bytes, which zstd stores once.
Decoded arrays are read-only.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import zstandard

from tinsmith import operations as ops
from tinsmith.errors import ServerError
from tinsmith.operations import Array, ExpertArray, TokenArray

OPERATION_TYPES: dict[str, type[ops.Operation]] = {
    "create_model": ops.CreateModel,
    "forward_backward": ops.ForwardBackward,
    "forward": ops.Forward,
    "optim_step": ops.OptimStep,
    "save_state": ops.SaveState,
    "load_state": ops.LoadState,
    "save_for_sampler": ops.SaveForSampler,
    "export_adapter": ops.ExportAdapter,
    "unload_model": ops.UnloadModel,
    "sample": ops.Sample,
}
RESULT_TYPES: dict[str, type[ops.Result]] = {
    "failed": ops.Failed,
    "model_created": ops.ModelCreated,
    "forward_backward_output": ops.ForwardBackwardOutput,
    "optim_step_output": ops.OptimStepOutput,
    "weights_saved": ops.WeightsSaved,
    "weights_loaded": ops.WeightsLoaded,
    "model_unloaded": ops.ModelUnloaded,
    "sample_output": ops.SampleOutput,
}
_OPERATION_NAMES: dict[type, str] = {cls: name for name, cls in OPERATION_TYPES.items()}
_RESULT_NAMES: dict[type, str] = {cls: name for name, cls in RESULT_TYPES.items()}
_MARK: Final = 0xC1
_ZSTD: Final = 1
_SHORT_BYTES: Final = 256  # compressing less saves nothing
_LEVEL: Final = 1
_NARROW: Final = (1, 2, 3, 4)  # bytes for an integer

_StoredArray = tuple[str, tuple[int, ...], bytes] | tuple[str, tuple[int, ...], bytes, int]
"""dtype, shape, little-endian bytes; and, if integers were cut, their width in bytes."""
_OBJECT_BYTES: Final = 512  # of an operation or an array in memory, not counting the array's content
_TOKEN_BYTES: Final = 8  # an id and its logprob
_CELL_BYTES: Final = 4  # a logprob alone
_INDEX_BYTES: Final = 8
_PER_ITEM: Final = 256


def kind_of(operation: ops.Operation) -> str:
    """Return the operation's kind, by which the store and the scheduler know it."""
    return _OPERATION_NAMES[type(operation)]


def encode_operation(operation: ops.Operation) -> bytes:
    """Return the bytes that the log stores. Their layout may change with versions; `canonical.py` never does."""
    return _compress(_ENCODER.encode(operation))


def decode_operation(kind: str, payload: bytes) -> ops.Operation:
    """Raise ServerError if the bytes are not a stored operation of this kind."""
    operation: ops.Operation = _decode(OPERATION_TYPES, kind, payload)
    return operation


def decoded_bytes(operation: ops.Operation) -> int:
    """Estimate the memory that an operation takes in an engine."""
    arrays: list[np.ndarray[Any, Any] | None] = []
    size = _OBJECT_BYTES
    match operation:
        case ops.ForwardBackward():
            for datum in operation.data:
                arrays += [datum.tokens_T, *datum.loss_inputs.values(), datum.routed_experts]
        case ops.Sample():
            arrays = [operation.prompt_P, operation.target_prompt_logprobs]
            if (layout := operation.target_layout) is not None:
                arrays += [layout.crow_indices, layout.col_indices]
    return size + sum(array.nbytes + _OBJECT_BYTES for array in arrays if array is not None)


def encode_result(result: ops.Result) -> tuple[str, bytes]:
    return _RESULT_NAMES[type(result)], _compress(_ENCODER.encode(result))


def decode_result(kind: str, payload: bytes) -> ops.Result:
    result: ops.Result = _decode(RESULT_TYPES, kind, payload)
    return result


def _decode(types: dict[str, Any], kind: str, payload: bytes) -> Any:  # one of the two unions above
    try:
        packed = _decompress(payload)
        return msgspec.msgpack.decode(packed, type=types[kind], dec_hook=_decode_array)
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        msg = f"stored {kind!r} of {len(payload)} bytes cannot be decoded: {error}"
        raise ServerError(msg) from error


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return _narrow(value)
    msg = f"{type(value).__name__} cannot be stored"
    raise NotImplementedError(msg)


def _decode_array(_: type, stored: Any) -> np.ndarray[Any, Any]:
    return _widen(stored)


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_array)


# the stored form


def _compress(packed: bytes) -> bytes:
    """Return the bytes to store for MessagePack."""
    if len(packed) < _SHORT_BYTES:
        return packed
    return bytes((_MARK, _ZSTD)) + zstandard.ZstdCompressor(level=_LEVEL).compress(packed)


def _decompress(stored: bytes) -> bytes:
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


def _narrow(array: np.ndarray[Any, Any]) -> _StoredArray:
    """Convert an array to its stored form, without loss."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    dtype, shape, size = little.dtype, little.shape, little.dtype.itemsize
    if dtype.kind in "iu" and little.size and little.min() >= 0:
        width = next((each for each in _NARROW if int(little.max()) < 1 << 8 * each), size)
        if width < size:
            cut = little.reshape(-1, 1).view(np.uint8)[:, :width]
            return dtype.str, shape, cut.tobytes(), width
    return dtype.str, shape, little.tobytes()


def _widen(stored: _StoredArray) -> np.ndarray[Any, Any]:
    """Return the read-only array of a stored form. If integers were not cut, it is a view of the bytes."""
    dtype, shape, data = np.dtype(stored[0]), stored[1], stored[2]
    if len(stored) == 3:
        return np.frombuffer(data, dtype).reshape(shape)
    wide = np.zeros((len(data) // stored[3], dtype.itemsize), np.uint8)
    wide[:, : stored[3]] = np.frombuffer(data, np.uint8).reshape(-1, stored[3])
    array = wide.view(dtype).reshape(shape)
    array.flags.writeable = False
    return array


# the experts of sampled sequences, found by the tokens that they computed (`records.ExpertsSampled`)


def digest_of(tokens: TokenArray) -> bytes:
    """Return what identifies a sequence of tokens."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").data).digest()


def encode_experts(experts: ExpertArray) -> bytes:
    return _compress(msgspec.msgpack.encode(_narrow(experts)))


def decode_experts(stored: bytes) -> ExpertArray:
    """Return a read-only array. Raise ValueError if the bytes are damaged."""
    return _widen(msgspec.msgpack.decode(_decompress(stored)))


# How many bytes operations and results take in the store at most, without encoding them: arrays before compression, and
# `_PER_ITEM` for each.


def largest_result(operation: ops.Operation) -> int:
    """Return a bound for the result of an operation: what it takes if the operation yields all that it asks for."""
    match operation:
        case ops.Sample():
            return _PER_ITEM + operation.num_samples * _largest_sequence(operation) + _prompt_scores(operation)
        case ops.ForwardBackward():
            return _PER_ITEM + sum(_largest_output(datum, operation.loss_fn) for datum in operation.data)
        case _:
            return _PER_ITEM


def _largest_sequence(operation: ops.Sample) -> int:
    per_token = _TOKEN_BYTES * (1 + operation.topk_sample_logprobs)
    return _PER_ITEM + operation.params.max_tokens * per_token


def _prompt_scores(operation: ops.Sample) -> int:
    num_prompt, targets, layout = len(operation.prompt_P), operation.target_prompt_logprobs, operation.target_layout
    size = num_prompt * _CELL_BYTES if operation.prompt_logprobs else 0
    size += num_prompt * (operation.topk_prompt_logprobs + operation.prompt_alt_tokens_k) * _TOKEN_BYTES
    if targets is not None:
        size += targets.size * _CELL_BYTES
    if layout is not None:
        size += (layout.crow_indices.size + layout.col_indices.size) * _INDEX_BYTES
    return size


def _largest_output(datum: ops.Datum, loss_fn: str) -> int:
    targets = datum.loss_inputs.get("target_tokens")
    num_arrays = 2 if loss_fn == "cross_entropy" else 1  # the loss of each target, beside its logprob
    return num_arrays * (_PER_ITEM + (0 if targets is None else targets.size * _CELL_BYTES))


def size_bound(result: ops.Result) -> int:
    """Return a bound for the size of a result."""
    match result:
        case ops.ForwardBackwardOutput():
            arrays = [array for output in result.loss_fn_outputs for array in output.values()]
            return _of_arrays(arrays) + _PER_ITEM * len(result.metrics)
        case ops.SampleOutput():
            return _of_arrays(list(_arrays_of(result)))
        case ops.Failed():
            return _PER_ITEM + 4 * len(result.message)  # at most four bytes per character
        case _:
            return _PER_ITEM


def _of_arrays(arrays: Sequence[Array]) -> int:
    return _PER_ITEM * (1 + len(arrays)) + sum(array.nbytes for array in arrays)


def _arrays_of(result: ops.SampleOutput) -> Iterator[Array]:
    for sequence in result.sequences:
        yield from (sequence.tokens, sequence.logprobs)
        yield from _cells(sequence.top_logprobs)
    yield from _cells(result.top_prompt_logprobs)
    yield from _cells(result.prompt_alt_tokens)
    for each in (result.prompt_logprobs, result.target_prompt_logprobs):
        if each is not None:
            yield each
    if result.target_layout is not None:
        yield from (result.target_layout.crow_indices, result.target_layout.col_indices)


def _cells(top: ops.TopLogprobs | None) -> tuple[Array, ...]:
    return () if top is None else (top.token_ids, top.logprobs)
