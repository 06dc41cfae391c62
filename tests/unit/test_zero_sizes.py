"""Zero is a size: an array with a zero in its shape has no elements, until it is reduced, repeated or multiplied.

So a product of sizes bounds nothing if one of them may be zero. Whatever a client can send with such a shape is refused
before anything as large as its other sizes is made: the decoders on the wire, and files from elsewhere.
"""

import json
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tinsmith import operations as ops
from tinsmith.backend import SamplerCapabilities, TrainerCapabilities
from tinsmith.checks import check_operation
from tinsmith.errors import ServerError, UserError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.protocol import training_request, translate, wire
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.store import EngineCapabilities
from tinsmith.store.codec import largest_result
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors

HUGE = 1 << 24
SHAPES = ([0], [0, 0], [0, HUGE], [HUGE, 0], [0, 1 << 40], [1 << 40, 0], [3, 0], [0, 3], [0, HUGE, HUGE], [3, 0, HUGE])
TRAINER = TrainerCapabilities(
    vocab_size=64, max_context_tokens=64, max_batch_tokens=64, max_models=1, losses=frozenset({"cross_entropy"})
)
SAMPLER = SamplerCapabilities(vocab_size=64, max_context_tokens=64, target_prompt_logprobs=True)
CAPABILITIES = EngineCapabilities.of(TRAINER, SAMPLER)
LOSSES = {spec.name: spec for spec in BUILTIN_LOSSES}
PEAK_BYTES = 1 << 20


def cheaply_refused(work: Callable[[], object], *errors: type[Exception]) -> None:
    """See that work raises one of the errors, and makes nothing large before."""
    tracemalloc.start()
    try:
        with pytest.raises(errors):
            work()
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["target_tokens", "weights"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_an_input_of_a_pass(shape: list[int], name: str, is_sparse: bool) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(3, dtype="<i4").tobytes()
    for each in {"target_tokens", name}:
        tensor = datum.loss_fn_inputs[each]
        tensor.dtype = pb.DTYPE_INT64 if each == "target_tokens" else pb.DTYPE_FLOAT32
        if each != name:
            tensor.dense = np.arange(3, dtype="<i8").tobytes()
            continue
        tensor.shape.extend(shape)
        if is_sparse:
            tensor.sparse_csr.crow_indices = np.zeros(4, "<i8").tobytes()
        else:
            tensor.dense = b""

    def work() -> None:
        operation = translate.forward_backward(training_request.parse(message.SerializeToString()))
        largest_result(operation)
        check_operation(operation, CAPABILITIES, LOSSES)

    cheaply_refused(work, UserError)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_targets_of_a_sample(shape: list[int], is_sparse: bool) -> None:
    targets = {"data": [], "dtype": "int64", "shape": shape}
    if is_sparse:
        targets |= {"sparse_crow_indices": [0, 0, 0], "sparse_col_indices": []}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"prompt": prompt, "sampling_params": {"max_tokens": 1}, "sampling_session_id": "s", "seq_id": 1}

    def work() -> None:
        request = wire.SampleRequest.model_validate({**body, "target_prompt_logprobs": targets})
        translate.check_targets(request)
        operation = translate.sample(request, sampling_session="s", snapshot_id=None, max_context_tokens=64)
        largest_result(operation)
        check_operation(operation, CAPABILITIES, LOSSES)

    cheaply_refused(work, UserError)


@pytest.mark.parametrize("name", ["num_samples", "max_tokens"])
def test_a_factor_of_the_bound_of_a_sample(name: str) -> None:
    """Beside a zero, the other factor would have no bound."""
    sizes = {"num_samples": 1 << 40, "max_tokens": 1 << 40, name: 0}
    operation = ops.Sample(
        sampling_session_id="s",
        snapshot_id=None,
        prompt_P=np.arange(3, dtype=np.int32),
        params=ops.SamplingParams(max_tokens=sizes["max_tokens"], seed=1),
        num_samples=sizes["num_samples"],
    )
    cheaply_refused(lambda: check_operation(operation, CAPABILITIES, LOSSES), UserError)
    small = replace(operation, num_samples=1, params=replace(operation.params, max_tokens=1))
    check_operation(small, CAPABILITIES, LOSSES)


@pytest.mark.parametrize("shape", [[0, 1 << 40], [1 << 40, 0], [0, 1 << 40, 1 << 40]], ids=str)
def test_a_tensor_of_a_file(tmp_path: Path, shape: list[int]) -> None:
    """Its bytes are as many as its header says: none."""
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    cheaply_refused(lambda: StoredTensors.of(tmp_path, "model")["w"], ServerError)
