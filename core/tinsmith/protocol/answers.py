"""Turns results into what SDK 0.38.0 reads: protobuf for passes and samples, JSON for everything else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import numpy as np
import orjson

from tinsmith import operations as ops
from tinsmith.errors import ServerError
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.protocol.tensors import to_bytes

JSON, PROTOBUF = "application/json", "application/x-protobuf"
GRAD_NORM_OF_HOSTED: Final = "unclipped_grad_l2:mean"

_STOP_REASONS: Mapping[ops.StopReason, pb.StopReason] = {
    "stop": pb.STOP_REASON_STOP,
    "length": pb.STOP_REASON_LENGTH,
}
_DTYPES: Mapping[str, tuple[pb.DType, str]] = {
    "float32": (pb.DTYPE_FLOAT32, "<f4"),
    "float64": (pb.DTYPE_FLOAT32, "<f4"),
    "int64": (pb.DTYPE_INT64, "<i8"),
    "int32": (pb.DTYPE_INT32, "<i4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The body of a 200 answer of retrieve_future."""

    body: bytes
    media_type: str = JSON


def answer(result: ops.Result) -> Answer:
    """Encode a result. May take milliseconds for a large one: call it off the event loop."""
    match result:
        case ops.ForwardBackwardOutput():
            message = forward_backward_output(result)
            return Answer(body=message.SerializeToString(deterministic=True), media_type=PROTOBUF)
        case ops.SampleOutput():
            return Answer(body=sample_response(result).SerializeToString(deterministic=True), media_type=PROTOBUF)
        case ops.Failed():
            return json_answer({"error": result.message, "category": result.category})
        case ops.ModelCreated():
            return json_answer({"model_id": result.model_id})  # of create_model and load_weights: no "type" fits both
        case ops.OptimStepOutput():
            return json_answer({"metrics": {key: json_number(value) for key, value in _step_metrics(result).items()}})
        case ops.WeightsSaved():
            return json_answer(
                _present(path=result.path, sampling_session_id=result.sampling_session_id, size_bytes=result.size_bytes)
            )
        case ops.WeightsLoaded():
            return json_answer({"path": result.path, "model_id": result.model_id})
        case ops.ModelUnloaded():
            return json_answer({"model_id": result.model_id})
        case _:
            assert_never(result)


def _step_metrics(output: ops.OptimStepOutput) -> dict[str, float]:
    """Return the norm before clipping under the name that hosted Tinker uses, too."""
    norm = {GRAD_NORM_OF_HOSTED: output.metrics["grad_norm"]} if "grad_norm" in output.metrics else {}
    return {**output.metrics, **norm}


def json_number(value: float) -> float | str:
    """JSON has no NaN; the SDK reads the words "nan", "inf" and "-inf" as numbers, and null as an error."""
    return value if math.isfinite(value) else str(float(value))


def _present(**fields: str | int | None) -> dict[str, str | int]:
    return {key: value for key, value in fields.items() if value is not None}


def json_answer(content: Mapping[str, object]) -> Answer:
    """Encode JSON. Arrays become lists; they hold finite numbers only."""
    return Answer(body=orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


# Passes ---------------------------------------------------------------------------------------------------------------


def forward_backward_output(output: ops.ForwardBackwardOutput) -> pb.ForwardBackwardOutput:
    """Put consecutive data whose fields agree in dtype and trailing shape into one record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(output.metrics))
    run: list[Mapping[str, ops.Array]] = []
    for datum in output.loss_fn_outputs:
        if run and _layout(datum) != _layout(run[0]):
            _add_record(message, run)
            run = []
        run.append(datum)
    if run:
        _add_record(message, run)
    return message


def _layout(datum: Mapping[str, ops.Array]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, datum[name].dtype.name, datum[name].shape[1:]) for name in sorted(datum)]


def _add_record(message: pb.ForwardBackwardOutput, run: Sequence[Mapping[str, ops.Array]]) -> None:
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(run))
    for name, dtype_name, trailing_shape in _layout(run[0]):
        if dtype_name not in _DTYPES:
            msg = f"output {name!r} has dtype {dtype_name}; backends return one of {', '.join(_DTYPES)}"
            raise ServerError(msg)
        dtype, stored = _DTYPES[dtype_name]
        parts = [to_bytes(datum[name], stored) for datum in run]
        offsets = np.cumsum([0, *(len(part) for part in parts)], dtype="<i8")
        tensor = record.fields[name]
        tensor.data, tensor.offsets, tensor.dtype = b"".join(parts), offsets.tobytes(), dtype
        tensor.trailing_shape.extend(trailing_shape)


# Samples --------------------------------------------------------------------------------------------------------------


def sample_response(output: ops.SampleOutput) -> pb.SampleResponse:
    message = pb.SampleResponse(
        sequences=[_sequence(sequence) for sequence in output.sequences],
        prompt_cache_hit_tokens=output.prompt_cache_hit_tokens,
    )
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = to_bytes(output.prompt_logprobs, "<f4")
    if output.top_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_top_logprobs(output.top_prompt_logprobs))
    if output.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_targets(output.target_prompt_logprobs, output.target_layout))
    if (drawn := output.prompt_alt_tokens) is not None:
        ids, shape = to_bytes(drawn.token_ids, "<i8"), drawn.token_ids.shape
        message.prompt_alt_tokens.tokens.CopyFrom(pb.Tensor(dense=ids, dtype=pb.DTYPE_INT64, shape=shape))
        message.prompt_alt_tokens.logprobs.CopyFrom(_targets(drawn.logprobs, None))
    return message


def _targets(scores: ops.FloatArray, layout: ops.SparseLayout | None) -> pb.Tensor:
    """In the layout of the request."""
    if layout is None:
        return pb.Tensor(dense=to_bytes(scores, "<f4"), dtype=pb.DTYPE_FLOAT32, shape=scores.shape)
    rows = np.repeat(np.arange(len(scores)), np.diff(layout.crow_indices))
    sparse = pb.SparseCsr(
        values=to_bytes(scores[rows, layout.col_indices], "<f4"),
        crow_indices=to_bytes(layout.crow_indices, "<i8"),
        col_indices=to_bytes(layout.col_indices, "<i8"),
    )
    return pb.Tensor(sparse_csr=sparse, dtype=pb.DTYPE_FLOAT32, shape=scores.shape)


def _sequence(sequence: ops.SampledSequence) -> pb.SampledSequence:
    message = pb.SampledSequence(
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=to_bytes(sequence.tokens, "<i4"),
        logprobs=to_bytes(sequence.logprobs, "<f4"),
        weights=[
            pb.WeightsSpan(sampling_session_id=each.sampling_session_id, length=each.length)
            for each in sequence.weights
        ],
    )
    if sequence.top_logprobs is not None:
        message.topk_sampled_logprobs.CopyFrom(_top_logprobs(sequence.top_logprobs))
    return message


def _top_logprobs(top: ops.TopLogprobs) -> pb.TopkLogprobs:
    length, k = top.token_ids.shape
    return pb.TopkLogprobs(
        token_ids=to_bytes(top.token_ids, "<i4"),
        logprobs=to_bytes(top.logprobs, "<f4"),
        k=k,
        length=length,
    )
