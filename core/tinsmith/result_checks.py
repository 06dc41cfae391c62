"""Compares a backend's or sampler's results with the request: types, numbers, lengths and dtypes; no copies.

The engine checks every result before it records it, and the contract suites check the same. Values are not judged,
except for tokens and the metrics of steps: a model that has diverged has losses and logprobs that are not finite.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tinsmith.backend import ModelState, Snapshot
from tinsmith.operations import (
    Array,
    Failed,
    ForwardBackward,
    ForwardBackwardOutput,
    OptimStep,
    OptimStepOutput,
    Sample,
    SampledSequence,
    SampleOutput,
    TopLogprobs,
    WeightsSpan,
)

_CATEGORIES: Final = ("user", "server", "unknown")
_STOP_REASONS: Final = ("stop", "length")
_INT_BITS: Final = 63  # of a number that the log can store
_NUMERIC: Final = "biuf"  # kinds of dtypes

# Any below: whatever a plugin has returned.


class WrongResultError(Exception):
    """A plugin has returned what its contract does not allow."""


def check_batch(operations: Sequence[ForwardBackward | OptimStep], results: Any) -> None:
    """Check the results of passes, or of optimizer steps. Raise WrongResultError."""
    if not isinstance(results, Sequence):
        raise _wrong("the results", results, "a sequence")
    if len(results) != len(operations):
        msg = f"{len(results)} results for {len(operations)} operations"
        raise WrongResultError(msg)
    for operation, result in zip(operations, results, strict=True):
        if isinstance(result, Failed):
            _check_failure(result)
        elif isinstance(operation, OptimStep):
            _check_type("the result", result, OptimStepOutput)
            _check_metrics(result.metrics)
            _check_finite(result.metrics)
        else:
            _check_type("the result", result, ForwardBackwardOutput)
            _check_pass(operation, result)


def check_sample(operation: Sample, result: Any, vocab_size: int) -> None:
    """Check the result of a sample. Raise WrongResultError."""
    if isinstance(result, Failed):
        _check_failure(result)
        return
    _check_type("the result", result, SampleOutput)
    _check_type("sequences", result.sequences, Sequence)
    if len(result.sequences) != operation.num_samples:
        msg = f"{len(result.sequences)} sequences, {operation.num_samples} were asked for"
        raise WrongResultError(msg)
    for sequence in result.sequences:
        _check_type("a sequence", sequence, SampledSequence)
        _check_sequence(operation, sequence, vocab_size)
    num_prompt = len(operation.prompt_P)
    _check_scores("prompt_logprobs", result.prompt_logprobs, (num_prompt,) if operation.prompt_logprobs else None)
    top = (num_prompt, operation.topk_prompt_logprobs)
    _check_top("top_prompt_logprobs", result.top_prompt_logprobs, top, vocab_size)
    targets = operation.target_prompt_logprobs
    _check_scores("target_prompt_logprobs", result.target_prompt_logprobs, None if targets is None else targets.shape)
    drawn = (num_prompt - 1, operation.prompt_alt_tokens_k)
    _check_top("prompt_alt_tokens", result.prompt_alt_tokens, drawn, vocab_size)
    if result.target_layout is not None:
        raise _wrong("target_layout", result.target_layout, "None, the engine fills it in")
    hits = result.prompt_cache_hit_tokens
    if not isinstance(hits, int) or not 0 <= hits <= num_prompt:
        raise _wrong("prompt_cache_hit_tokens", hits, f"an int from 0 to {num_prompt}")


def check_state(state: Any) -> None:
    """Check a captured state, but for its tensors, which may not have been read yet. Raise WrongResultError."""
    _check_type("the state", state, ModelState)
    if not isinstance(state.step, int) or state.step < 0:
        raise _wrong("the step of the state", state.step, "an int from 0 on")


def check_snapshot(snapshot_id: str, snapshot: Any) -> None:
    """Check what was published. Raise WrongResultError."""
    _check_type("the snapshot", snapshot, Snapshot)
    if snapshot.snapshot_id != snapshot_id:
        msg = f"the snapshot has another id than {snapshot_id!r}"
        raise WrongResultError(msg)


def _check_pass(operation: ForwardBackward, result: ForwardBackwardOutput) -> None:
    _check_type("loss_fn_outputs", result.loss_fn_outputs, Sequence)
    if len(result.loss_fn_outputs) != len(operation.data):
        msg = f"{len(result.loss_fn_outputs)} loss_fn_outputs for {len(operation.data)} data"
        raise WrongResultError(msg)
    for datum, outputs in zip(operation.data, result.loss_fn_outputs, strict=True):
        _check_type("loss_fn_outputs of a datum", outputs, Mapping)
        _check_array("logprobs", outputs.get("logprobs"), datum.loss_inputs["target_tokens"].shape)
        if len(outputs) > 1:
            for name, array in outputs.items():
                _check_other(name, array)
    _check_metrics(result.metrics)
    if "loss:sum" not in result.metrics:
        msg = "no metric loss:sum"
        raise WrongResultError(msg)


def _check_sequence(operation: Sample, sequence: SampledSequence, vocab_size: int) -> None:
    tokens, most = sequence.tokens, operation.params.max_tokens
    _check_tokens("tokens", tokens, vocab_size)
    if tokens.ndim != 1 or not 1 <= len(tokens) <= most:
        msg = f"tokens of shape {list(tokens.shape)}, allowed: [1] to [{most}]"
        raise WrongResultError(msg)
    _check_array("logprobs", sequence.logprobs, tokens.shape)
    if sequence.stop_reason not in _STOP_REASONS:
        raise _wrong("stop_reason", sequence.stop_reason, " or ".join(_STOP_REASONS))
    top = (len(tokens), operation.topk_sample_logprobs)
    _check_top("top_logprobs", sequence.top_logprobs, top, vocab_size)
    _check_weights(sequence)
    experts, num_computed = sequence.routed_experts, len(operation.prompt_P) + len(tokens) - 1
    if experts is None:
        return
    _check_other("routed_experts", experts)
    if experts.dtype != np.uint16 or experts.ndim != 3 or len(experts) != num_computed:
        msg = f"routed_experts is {experts.dtype} {list(experts.shape)}, expected uint16 [{num_computed}, L, C]"
        raise WrongResultError(msg)


def _check_weights(sequence: SampledSequence) -> None:
    """Check whose weights drew the tokens, if the sampler tells."""
    _check_type("weights", sequence.weights, tuple)
    for span in sequence.weights:
        _check_type("a span of weights", span, WeightsSpan)
        _check_type("the snapshot of a span", span.snapshot_id, str)
        if type(span.length) is not int or span.length < 1:
            raise _wrong("the length of a span", span.length, "an int above 0")
    spanned = sum(span.length for span in sequence.weights)
    if sequence.weights and spanned != len(sequence.tokens):
        msg = f"weights of {spanned} tokens, for {len(sequence.tokens)} tokens"
        raise WrongResultError(msg)


def _check_top(name: str, top: Any, shape: tuple[int, int], vocab_size: int) -> None:
    """Check alternatives; `shape` is [length, k]."""
    if not shape[1]:
        if top is not None:
            raise _wrong(name, top, "None, as none were asked for")
        return
    _check_type(name, top, TopLogprobs)
    _check_tokens(f"{name}.token_ids", top.token_ids, vocab_size)
    if top.token_ids.shape != shape:
        msg = f"{name}.token_ids of shape {list(top.token_ids.shape)}, expected {list(shape)}"
        raise WrongResultError(msg)
    _check_array(f"{name}.logprobs", top.logprobs, shape)


def _check_scores(name: str, scores: Any, shape: tuple[int, ...] | None) -> None:
    if shape is not None:
        _check_array(name, scores, shape)
    elif scores is not None:
        raise _wrong(name, scores, "None, as none were asked for")


def _check_tokens(name: str, tokens: Any, vocab_size: int) -> None:
    _check_type(name, tokens, np.ndarray)
    if tokens.dtype != np.int32:
        raise _wrong(name, tokens, "int32")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        msg = f"{name} from {tokens.min()} to {tokens.max()}, the vocabulary has {vocab_size}"
        raise WrongResultError(msg)


def _check_array(name: str, array: Any, shape: tuple[int, ...]) -> None:
    _check_type(name, array, np.ndarray)
    if array.dtype != np.float32 or array.shape != shape:
        raise _wrong(name, array, f"float32 {list(shape)}")


def _check_other(name: Any, array: Any) -> None:
    _check_type("the name of an output", name, str)
    _check_type(name, array, np.ndarray)
    if array.dtype.kind not in _NUMERIC:
        raise _wrong(name, array, "an array of numbers")


def _check_metrics(metrics: Any) -> None:
    _check_type("metrics", metrics, Mapping)
    for name, value in metrics.items():
        _check_type("the name of a metric", name, str)
        if type(value) not in (float, int) or (type(value) is int and value.bit_length() > _INT_BITS):
            raise _wrong(f"the metric {name}", value, "a float of Python, not of NumPy")  # the log stores these alone


def _check_finite(metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise _wrong(f"the metric {name} of a step", value, "a finite number: a step that is not finite fails")


def _check_failure(failure: Failed) -> None:
    _check_type("the message of a failure", failure.message, str)
    if failure.category not in _CATEGORIES:
        raise _wrong("the category of a failure", failure.category, " or ".join(_CATEGORIES))


def _check_type(name: str, value: Any, expected: type) -> None:
    if not isinstance(value, expected):
        raise _wrong(name, value, f"a {expected.__name__}")


def _wrong(name: str, value: Any, expected: str) -> WrongResultError:
    return WrongResultError(f"{name} is {_described(value)}, expected {expected}")


def _described(value: Any) -> str:
    """Describe a value by its type. Of a stranger's object, nothing else is safe to print."""
    if isinstance(value, np.ndarray):
        array: Array = value
        return f"{array.dtype} {list(array.shape)}"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"
