"""Results of passes and samples as JSON, for clients without protobuf. Fields have the names of the SDK's types."""

from typing import Any, Final

import numpy as np

from tinsmith import operations as ops
from tinsmith.protocol.answers import Answer, answer, json_answer, json_number

_UNUSED_LOGPROB: Final = -99999.0

Object = dict[str, Any]  # Any: JSON, and arrays that become lists


def answer_in_json(result: ops.Result) -> Answer:
    """Encode a result. May take long for a large one: call it off the event loop."""
    match result:
        case ops.ForwardBackwardOutput():
            return json_answer(_of_pass(result))
        case ops.SampleOutput():
            return json_answer(_of_sample(result))
        case _:
            return answer(result)


def _of_pass(output: ops.ForwardBackwardOutput) -> Object:
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {name: _tensor(values) for name, values in datum.items()} for datum in output.loss_fn_outputs
        ],
        "metrics": {name: json_number(value) for name, value in output.metrics.items()},
    }


def _of_sample(output: ops.SampleOutput) -> Object:
    targets, layout, drawn = output.target_prompt_logprobs, output.target_layout, output.prompt_alt_tokens
    return _present(
        sequences=[_sequence(sequence) for sequence in output.sequences],
        prompt_logprobs=None if output.prompt_logprobs is None else _scores(output.prompt_logprobs),
        topk_prompt_logprobs=_best(output.top_prompt_logprobs),
        target_prompt_logprobs=None if targets is None else _targets(targets, layout),
        prompt_alt_tokens=None
        if drawn is None
        else {"tokens": _tensor(drawn.token_ids), "logprobs": _tensor(drawn.logprobs)},
        prompt_cache_hit_tokens=output.prompt_cache_hit_tokens,
    )


def _sequence(sequence: ops.SampledSequence) -> Object:
    weights = [{"sampling_session_id": each.sampling_session_id, "length": each.length} for each in sequence.weights]
    return _present(
        stop_reason=sequence.stop_reason,
        tokens=np.ascontiguousarray(sequence.tokens),
        logprobs=_numbers(sequence.logprobs),
        topk_logprobs=_best(sequence.top_logprobs),
        weights=weights or None,
    )


def _targets(scores: ops.FloatArray, layout: ops.SparseLayout | None) -> Object:
    """Return the scores in the layout of the request."""
    if layout is None:
        return _tensor(scores)
    rows = np.repeat(np.arange(len(scores)), np.diff(layout.crow_indices))
    return {
        **_tensor(scores[rows, layout.col_indices]),
        "shape": scores.shape,
        "sparse_crow_indices": layout.crow_indices,
        "sparse_col_indices": layout.col_indices,
    }


def _tensor(values: ops.Array) -> Object:
    if np.issubdtype(values.dtype, np.integer):
        return {"data": np.ravel(values), "dtype": "int64", "shape": values.shape}
    return {"data": _numbers(np.ravel(values)), "dtype": "float32", "shape": values.shape}


def _numbers(values: ops.FloatArray) -> ops.FloatArray | list[float | str]:
    """Return a flat array as float32. In JSON, numbers that are not finite are words."""
    if np.isfinite(values).all():
        return np.ascontiguousarray(values, np.float32)
    return [json_number(float(value)) for value in values]


def _scores(values: ops.FloatArray) -> list[float | str | None]:
    """Return logprobs of a prompt. NaN means that a token was not scored: null."""
    return [None if np.isnan(value) else json_number(float(value)) for value in values]


def _best(top: ops.TopLogprobs | None) -> list[list[tuple[int, float]] | None] | None:
    """Return `[token, logprob]` of the best tokens at each position, null where none was scored."""
    if top is None:
        return None
    rows = zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] != _UNUSED_LOGPROB] or None for row in rows]


def _present(**fields: object) -> Object:
    return {name: value for name, value in fields.items() if value is not None}
