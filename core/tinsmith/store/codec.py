"""Encoding operations and results: MessagePack of their dataclasses, with arrays as little-endian bytes.

`compression.py` describes the stored bytes. Decoded arrays are read-only.
"""

from typing import Any

import msgspec
import numpy as np

from tinsmith import operations as ops
from tinsmith.errors import ServerError
from tinsmith.store import compression as stored_bytes

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
_OBJECT_BYTES = 512  # of an operation or an array, not counting the array's content
_OPERATION_NAMES: dict[type, str] = {cls: name for name, cls in OPERATION_TYPES.items()}
_RESULT_NAMES: dict[type, str] = {cls: name for name, cls in RESULT_TYPES.items()}


def kind_of(operation: ops.Operation) -> str:
    """Return the operation's kind, by which the store and the scheduler know it."""
    return _OPERATION_NAMES[type(operation)]


def encode_operation(operation: ops.Operation) -> bytes:
    """Return the bytes that the log stores. Their layout may change with versions; `canonical.py` never does."""
    return stored_bytes.compress(_ENCODER.encode(operation))


def decode_operation(kind: str, payload: bytes) -> ops.Operation:
    """Raise ServerError if the bytes are not a stored operation of this kind."""
    operation: ops.Operation = _decode(OPERATION_TYPES, kind, payload)
    return operation


def decoded_bytes(operation: ops.Operation) -> int:
    """Estimate the memory that an operation takes in an engine."""
    arrays: list[np.ndarray[Any, Any] | None] = []
    match operation:
        case ops.ForwardBackward():
            for datum in operation.data:
                arrays += [datum.tokens_T, *datum.loss_inputs.values(), datum.routed_experts]
        case ops.Sample():
            arrays = [operation.prompt_P, operation.target_prompt_logprobs]
            if (layout := operation.target_layout) is not None:
                arrays += [layout.crow_indices, layout.col_indices]
    return _OBJECT_BYTES + sum(array.nbytes + _OBJECT_BYTES for array in arrays if array is not None)


def encode_result(result: ops.Result) -> tuple[str, bytes]:
    return _RESULT_NAMES[type(result)], stored_bytes.compress(_ENCODER.encode(result))


def decode_result(kind: str, payload: bytes) -> ops.Result:
    result: ops.Result = _decode(RESULT_TYPES, kind, payload)
    return result


def _decode(types: dict[str, Any], kind: str, payload: bytes) -> Any:  # one of the two unions above
    try:
        packed = stored_bytes.decompress(payload)
        return msgspec.msgpack.decode(packed, type=types[kind], dec_hook=_decode_array)
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        msg = f"stored {kind!r} of {len(payload)} bytes cannot be decoded: {error}"
        raise ServerError(msg) from error


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return stored_bytes.narrow(value)
    msg = f"{type(value).__name__} cannot be stored"
    raise NotImplementedError(msg)


def _decode_array(_: type, stored: Any) -> np.ndarray[Any, Any]:
    return stored_bytes.widen(stored)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
