"""How many bytes operations and results take in the store at most, without encoding them.

Each bound counts arrays before compression, plus `_PER_ITEM` bytes of overhead per array.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from tinsmith import operations as ops
from tinsmith.operations import Array

_TOKEN_BYTES: Final = 8  # an id and its logprob
_CELL_BYTES: Final = 4  # a logprob alone
_INDEX_BYTES: Final = 8
_PER_ITEM: Final = 256


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
    size += num_prompt * operation.topk_prompt_logprobs * _TOKEN_BYTES
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
    for each in (result.prompt_logprobs, result.target_prompt_logprobs):
        if each is not None:
            yield each
    if result.target_layout is not None:
        yield from (result.target_layout.crow_indices, result.target_layout.col_indices)


def _cells(top: ops.TopLogprobs | None) -> tuple[Array, ...]:
    return () if top is None else (top.token_ids, top.logprobs)
