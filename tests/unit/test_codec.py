"""Every operation and result survives the round trip through bytes, whatever its arrays hold."""

import hashlib
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from typing import Any

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tinsmith import operations as ops
from tinsmith.errors import ServerError
from tinsmith.store.canonical import add_canonical
from tinsmith.store.codec import (
    OPERATION_TYPES,
    RESULT_TYPES,
    decode_experts,
    decode_operation,
    decode_result,
    encode_experts,
    encode_operation,
    encode_result,
    kind_of,
)

# a busy machine is no fault
unhurried = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

TEXT = st.text(max_size=20)
FLOATS = st.floats(allow_nan=False)
INTS = st.integers(-(2**63), 2**63 - 1)
METADATA = st.dictionaries(TEXT, TEXT, max_size=3)
NUMBERS = st.dictionaries(TEXT, FLOATS, max_size=3)


def array(dtype: Any, dims: int | None = None) -> st.SearchStrategy[Any]:
    shapes = arrays.array_shapes(min_dims=dims or 1, max_dims=dims or 2, min_side=0, max_side=5)
    return arrays.arrays(dtype, shapes)  # NaN, infinities and subnormal numbers included


ARRAYS = st.one_of(array(np.float32), array(np.int64))
LORA = st.builds(
    ops.LoraConfig,
    rank=st.integers(1, 512),
    seed=INTS,
    alpha=st.floats(1, 64),
    train_attn=st.booleans(),
    train_mlp=st.booleans(),
    train_unembed=st.booleans(),
)
DATA = st.lists(
    st.builds(ops.Datum, tokens_T=array(np.int32, 1), loss_inputs=st.dictionaries(TEXT, ARRAYS, max_size=3)),
    max_size=3,
).map(tuple)
TOP = st.builds(ops.TopLogprobs, token_ids=array(np.int32, 2), logprobs=array(np.float32, 2))
FORWARD = {"model_id": TEXT, "data": DATA, "loss_fn": TEXT, "loss_fn_config": NUMBERS}
TTL = st.none() | INTS
OPERATIONS: dict[str, st.SearchStrategy[Any]] = {
    "create_model": st.builds(
        ops.CreateModel, model_id=TEXT, lora=LORA, checkpoint=st.none() | TEXT, load_optimizer=st.booleans()
    ),
    "forward_backward": st.builds(ops.ForwardBackward, **FORWARD),
    "forward": st.builds(ops.Forward, **FORWARD),
    "optim_step": st.builds(
        ops.OptimStep,
        model_id=TEXT,
        adam=st.builds(ops.AdamParams, learning_rate=FLOATS, beta1=FLOATS, eps=FLOATS, grad_clip_norm=FLOATS),
    ),
    "save_state": st.builds(
        ops.SaveState, model_id=TEXT, path=TEXT, overwrite=st.booleans(), ttl_seconds=TTL, user_metadata=METADATA
    ),
    "load_state": st.builds(ops.LoadState, model_id=TEXT, path=TEXT, load_optimizer=st.booleans()),
    "save_for_sampler": st.builds(
        ops.SaveForSampler,
        model_id=TEXT,
        path=st.none() | TEXT,
        sampling_session_id=st.none() | TEXT,
        ttl_seconds=TTL,
        user_metadata=METADATA,
    ),
    "export_adapter": st.builds(ops.ExportAdapter, model_id=TEXT, path=TEXT, ttl_seconds=TTL),
    "unload_model": st.builds(ops.UnloadModel, model_id=TEXT),
    "sample": st.builds(
        ops.Sample,
        sampling_session_id=TEXT,
        snapshot_id=st.none() | TEXT,
        prompt_P=array(np.int32, 1),
        params=st.builds(
            ops.SamplingParams,
            max_tokens=INTS,
            seed=st.integers(0, 2**63 - 1),
            temperature=FLOATS,
            stop_strings=st.lists(TEXT, max_size=3).map(tuple),
            stop_tokens=st.lists(INTS, max_size=3).map(tuple),
            stop_at_eos=st.booleans(),
        ),
        num_samples=INTS,
        prompt_logprobs=st.booleans(),
        prompt_logprobs_last_n=st.none() | INTS,
        target_prompt_logprobs=st.none() | array(np.int64, 2),
    ),
}
RESULTS: dict[str, st.SearchStrategy[Any]] = {
    "failed": st.builds(ops.Failed, message=TEXT, category=st.sampled_from(["user", "server", "unknown"])),
    "model_created": st.builds(ops.ModelCreated, model_id=TEXT),
    "forward_backward_output": st.builds(
        ops.ForwardBackwardOutput,
        loss_fn_outputs=st.lists(st.dictionaries(TEXT, ARRAYS, max_size=2), max_size=3).map(tuple),
        metrics=NUMBERS,
    ),
    "optim_step_output": st.builds(ops.OptimStepOutput, metrics=NUMBERS),
    "weights_saved": st.builds(
        ops.WeightsSaved, path=st.none() | TEXT, sampling_session_id=st.none() | TEXT, size_bytes=TTL
    ),
    "weights_loaded": st.builds(ops.WeightsLoaded, model_id=TEXT, path=TEXT),
    "model_unloaded": st.builds(ops.ModelUnloaded, model_id=TEXT),
    "sample_output": st.builds(
        ops.SampleOutput,
        sequences=st.lists(
            st.builds(
                ops.SampledSequence,
                tokens=array(np.int32, 1),
                logprobs=array(np.float32, 1),
                stop_reason=st.sampled_from(["stop", "length"]),
                top_logprobs=st.none() | TOP,
            ),
            max_size=3,
        ).map(tuple),
        prompt_logprobs=st.none() | array(np.float32, 1),
        top_prompt_logprobs=st.none() | TOP,
        target_prompt_logprobs=st.none() | array(np.float32, 2),
        prompt_cache_hit_tokens=INTS,
    ),
}


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare deeply: types, and arrays bit for bit, NaN payloads included."""
    assert type(actual) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()
    elif is_dataclass(expected):
        for field in fields(expected):
            assert_equal(getattr(actual, field.name), getattr(expected, field.name))
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_equal(actual[key], expected[key])
    elif isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for left, right in zip(actual, expected, strict=True):
            assert_equal(left, right)
    else:
        assert actual == expected


def test_every_kind_is_tried() -> None:
    assert OPERATIONS.keys() == OPERATION_TYPES.keys()
    assert RESULTS.keys() == RESULT_TYPES.keys()


@unhurried
@given(st.one_of(*OPERATIONS.values()))
def test_operations_come_back(operation: Any) -> None:
    kind = kind_of(operation)
    assert_equal(decode_operation(kind, encode_operation(operation)), operation)


@given(st.datetimes(datetime(1970, 1, 1), timezones=st.just(UTC)), st.booleans())  # noqa: DTZ001 - made aware
def test_the_right_to_load_comes_back_and_is_no_part_of_what_was_sent(created_at: datetime, public: bool) -> None:
    sent = ops.LoadState(model_id="m", path="p", load_optimizer=True)
    added = replace(sent, right=ops.ReadRight(created_at=created_at, only_while_public=public))
    assert decode_operation("load_state", encode_operation(added)) == added
    assert canonical_bytes(added) == canonical_bytes(sent)


@unhurried
@given(st.one_of(*RESULTS.values()))
def test_results_come_back(result: Any) -> None:
    kind, payload = encode_result(result)
    assert_equal(decode_result(kind, payload), result)


def test_arrays_of_any_layout_come_back() -> None:
    """Views, transposed and big-endian arrays; what comes back cannot be written into."""
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    for array in (whole.T, whole[::2, ::-1], whole.astype(">f4")):
        output = ops.ForwardBackwardOutput(loss_fn_outputs=({"logprobs": array},), metrics={"loss:sum": 0.0})
        back = decode_result(*encode_result(output))
        assert isinstance(back, ops.ForwardBackwardOutput)
        decoded = back.loss_fn_outputs[0]["logprobs"]
        np.testing.assert_array_equal(decoded, array)
        assert decoded.dtype == np.dtype("<f4")
        assert not decoded.flags.writeable


@unhurried
@given(st.one_of(*OPERATIONS.values()))
def test_the_first_layout_is_read_still(operation: Any) -> None:
    """Logs of before the layouts had numbers hold the canonical bytes."""
    assert_equal(decode_operation(kind_of(operation), canonical_bytes(operation)), operation)


@unhurried
@given(st.one_of(*OPERATIONS.values()))
def test_the_parts_of_the_canonical_form_are_its_messagepack(operation: Any) -> None:
    assert canonical_bytes(operation) == msgspec.msgpack.encode(_as_sent(operation), enc_hook=_whole_array)


def test_what_the_server_adds_is_not_in_the_canonical_form() -> None:
    operation = a_pass(5)
    (datum,) = operation.data
    routed = replace(datum, routed_experts=np.zeros((5, 2, 1), np.uint16))
    assert canonical_bytes(replace(operation, data=(routed,))) == canonical_bytes(operation)
    assert canonical_bytes(operation).find(b"routed") == -1


def _as_sent(operation: Any) -> Any:
    """Return the operation as it was before the server could add anything to it."""
    content = {each.name: getattr(operation, each.name) for each in fields(operation)}
    for added in ("right", "stands_in_for", "streamed"):
        content.pop(added, None)
    if not isinstance(operation, ops.ForwardBackward):
        return content
    data = [{"tokens_T": datum.tokens_T, "loss_inputs": datum.loss_inputs} for datum in operation.data]
    return {**content, "data": data}


@pytest.mark.parametrize("length", [0, 15, 16, 255, 256, (1 << 16) - 1, 1 << 16])
def test_the_canonical_form_states_every_length_as_messagepack_does(length: int) -> None:
    value = {
        "bytes": np.zeros(length, np.uint8),
        "items": [None] * length,
        "names": dict.fromkeys(map(str, range(length))),
    }
    assert canonical_bytes(value) == msgspec.msgpack.encode(value, enc_hook=_whole_array)


def canonical_bytes(value: object) -> bytes:
    parts: list[bytes | memoryview] = []
    add_canonical(value, parts.append)
    return b"".join(parts)


def _whole_array(value: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], bytes]:
    little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    return little.dtype.str, little.shape, little.tobytes()


def a_pass(num_tokens: int) -> ops.ForwardBackward:
    rng = np.random.default_rng(num_tokens)
    tokens = rng.integers(0, 151_936, num_tokens + 1)
    inputs = {"target_tokens": tokens[1:], "weights": rng.random(num_tokens, np.float32)}
    datum = ops.Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id="s1:train:0", data=(datum,))


def test_what_a_repeat_is_compared_by_does_not_change_with_versions() -> None:
    """A client may repeat a request after an upgrade; other bytes would make it a conflict."""
    digest = hashlib.sha256(canonical_bytes(a_pass(1000))).hexdigest()
    assert digest == "79958bd55317dc02d75ed6b54d3eb4c5a9c423875c9bcbda69ed90c0ea63522f"


def test_a_pass_is_stored_in_few_bytes() -> None:
    """Of any vocabulary up to 2**24: 3 bytes a token and 4 a weight at most; the targets are the tokens, shifted."""
    operation = a_pass(1000)
    stored = encode_operation(operation)
    assert len(stored) / 1000 < 7.3
    assert len(canonical_bytes(operation)) / 1000 > 16
    assert_equal(decode_operation("forward_backward", stored), operation)
    assert stored[:2] == b"\xc1\x01"
    with pytest.raises(ServerError, match="layout 9 is not known; a newer tinsmith may have written it"):
        decode_operation("forward_backward", b"\xc1\x09" + stored[2:])
    with pytest.raises(ServerError, match="the compressed bytes are damaged"):
        decode_operation("forward_backward", stored[:-1])


@unhurried
@given(arrays.arrays(np.int64, st.integers(0, 5), elements=st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**33)))
def test_narrow_integers_come_back(array: Any) -> None:
    assert_equal(decode_experts(encode_experts(array)), array)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [("no_such_kind", b"\x80"), ("optim_step", b""), ("optim_step", b"\xff\xff"), ("optim_step", b"\x80")],
)
def test_damaged_bytes_are_our_fault(kind: str, payload: bytes) -> None:
    with pytest.raises(ServerError, match=f"stored '{kind}' of {len(payload)} bytes cannot be decoded"):
        decode_operation(kind, payload)


@unhurried
@given(st.binary(max_size=50))
def test_garbage_never_raises_anything_else(payload: bytes) -> None:
    for kind in OPERATION_TYPES:
        try:
            decode_operation(kind, payload)
        except ServerError:
            continue
