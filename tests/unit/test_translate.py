"""Requests, encoded by the SDK itself where it has an encoder, to operations."""

import sys
from typing import Any

import numpy as np
import pytest
import tinker
from tinker.proto import tinker_public_pb2 as sdk_pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from tinsmith import operations as ops
from tinsmith.errors import CapacityError, ConfigError, UnsupportedError, UserError
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.protocol import training_request, translate, wire
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.protocol.stable_reinforce import StandIn
from tinsmith.protocol.tensors import tensor_from_proto
from tinsmith.protocol.training_request import TrainingRequest
from tinsmith.protocol.unknown_fields import validated
from tinsmith.settings import LossSettings
from tinsmith.store.codec import decode_operation, encode_operation

MODEL = "s:train:0"


def datum(tokens: list[int], **inputs: object) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def encoded(data: list[tinker.Datum], **fields: object) -> TrainingRequest:
    request = tinker.types.ForwardBackwardRequest(
        forward_backward_input=tinker.types.ForwardBackwardInput(
            data=data, loss_fn=fields.pop("loss_fn", "cross_entropy"), loss_fn_config=fields.pop("loss_fn_config", None)
        ),
        model_id=MODEL,
        seq_id=1,
    )
    message = forward_backward_request_to_proto(request, **fields)
    return parsed(message)


def parsed(message: pb.ForwardBackwardRequest) -> TrainingRequest:
    return training_request.parse(message.SerializeToString())


def test_the_sdks_bytes_become_an_operation() -> None:
    request = encoded([datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, -2.5])])
    operation = translate.forward_backward(request)
    assert type(operation) is ops.ForwardBackward
    assert operation.model_id == MODEL
    assert operation.loss_fn == "cross_entropy"
    (only,) = operation.data
    np.testing.assert_array_equal(only.tokens_T, np.array([1, 2, 3], np.int32))
    assert only.loss_inputs["target_tokens"].dtype == np.int64
    np.testing.assert_array_equal(only.loss_inputs["weights"], np.array([0, 1, -2.5], np.float32))


def test_several_text_chunks_are_one_input() -> None:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    one = message.data.add()
    for tokens in ([1, 2], [], [3]):
        one.model_input.add(encoded_text=pb.EncodedTextChunk(tokens=np.array(tokens, "<i4").tobytes()))
    np.testing.assert_array_equal(translate.forward_backward(parsed(message)).data[0].tokens_T, [1, 2, 3])


def test_maps_are_sorted_so_that_repeats_are_equal() -> None:
    config = {"clip_high_threshold": 1.2, "clip_low_threshold": 0.8}
    one = translate.forward_backward(
        encoded([datum([1], target_tokens=[1], logprobs=[0.0], advantages=[1.0])], loss_fn="ppo", loss_fn_config=config)
    )
    two = translate.forward_backward(
        encoded(
            [datum([1], advantages=[1.0], logprobs=[0.0], target_tokens=[1])],
            loss_fn="ppo",
            loss_fn_config=dict(reversed(config.items())),
        )
    )
    assert list(one.data[0].loss_inputs) == list(two.data[0].loss_inputs) == ["advantages", "logprobs", "target_tokens"]
    assert one.loss_fn_config == config
    assert translate.digest(one) == translate.digest(two)


def test_forward_only_is_another_operation() -> None:
    message = encoded([datum([1], target_tokens=[1], weights=[1.0])])
    backward = translate.forward_backward(message)
    message.head.forward_only = True
    forward = translate.forward_backward(message)
    assert type(forward) is ops.Forward
    assert translate.digest(forward) != translate.digest(backward)


def test_sparse_targets_become_dense() -> None:
    torch = pytest.importorskip("torch")
    targets = torch.zeros((4, 50), dtype=torch.int64)
    targets[2, 7] = 11
    weights = torch.zeros((4, 50))
    weights[2, 7] = 0.5
    message = encoded([datum([1, 2, 3, 4], target_tokens=targets, weights=weights)])
    assert message.datum(0).loss_fn_inputs["target_tokens"].WhichOneof("encoding") == "sparse_csr"
    inputs = translate.forward_backward(message).data[0].loss_inputs
    np.testing.assert_array_equal(inputs["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(inputs["weights"], weights.numpy())


def test_cross_entropy_without_weights_counts_every_target_once() -> None:
    for targets in (np.array([2, 0, 4]), np.array([[2, 1], [3, 1], [4, 1]])):
        inputs = translate.forward_backward(encoded([datum([1, 2, 3], target_tokens=targets)])).data[0].loss_inputs
        assert inputs["weights"].dtype == np.float32
        np.testing.assert_array_equal(inputs["weights"], np.ones(targets.shape))
    other_loss = translate.forward_backward(encoded([datum([1], target_tokens=[2])], loss_fn="ppo"))
    assert list(other_loss.data[0].loss_inputs) == ["target_tokens"]


def test_what_sparse_targets_do_not_list_counts_nothing() -> None:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    targets = message.data.add().loss_fn_inputs["target_tokens"]
    targets.dtype = pb.DTYPE_INT64
    targets.shape.extend([3, 2])
    targets.sparse_csr.values = np.array([9, 0, 7], "<i8").tobytes()
    targets.sparse_csr.crow_indices = np.array([0, 1, 1, 3], "<i8").tobytes()
    targets.sparse_csr.col_indices = np.array([1, 0, 1], "<i8").tobytes()
    inputs = translate.forward_backward(parsed(message)).data[0].loss_inputs
    np.testing.assert_array_equal(inputs["target_tokens"], [[0, 9], [0, 0], [0, 7]])
    np.testing.assert_array_equal(inputs["weights"], [[0, 1], [0, 0], [1, 1]])


def sparse_targets(*col_indices: int) -> TrainingRequest:
    """All but the last in the first of two rows."""
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    targets = message.data.add().loss_fn_inputs["target_tokens"]
    targets.dtype = pb.DTYPE_INT64
    targets.shape.extend([2, 3])
    num_cells = len(col_indices)
    targets.sparse_csr.values = np.arange(1, num_cells + 1).astype("<i8").tobytes()
    targets.sparse_csr.crow_indices = np.array([0, num_cells - 1, num_cells], "<i8").tobytes()
    targets.sparse_csr.col_indices = np.array(col_indices, "<i8").tobytes()
    return parsed(message)


def test_cells_of_sparse_tensors_come_once_in_any_order() -> None:
    inputs = translate.forward_backward(sparse_targets(2, 0, 0)).data[0].loss_inputs
    np.testing.assert_array_equal(inputs["target_tokens"], [[2, 0, 1], [3, 0, 0]])
    for repeated in ((2, 2, 0), (2, 0, 2, 1)):
        with pytest.raises(UserError, match="target_tokens: this sparse tensor has several values for row 0, column 2"):
            translate.forward_backward(sparse_targets(*repeated))


def test_a_setting_has_one_value() -> None:
    message = encoded([datum([1], target_tokens=[1])], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.8})
    message.head.loss_fn_config["clip_low_threshold"] = 0.9
    with pytest.raises(UserError, match=r"'clip_low_threshold' is 0\.9, and 0\.8 in loss_fn_config_v2"):
        translate.forward_backward(message)
    for first in ({}, {"clip_low_threshold": float("nan")}):
        message.head.loss_fn_config_v2["clip_low_threshold"].number = float("nan")
        message.head.loss_fn_config.clear()
        message.head.loss_fn_config.update(first)
        assert np.isnan(translate.forward_backward(message).loss_fn_config["clip_low_threshold"])  # checked as others


def test_spans_are_accepted_and_change_nothing() -> None:
    plain = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    plain.data.add().model_input.add().encoded_text.tokens = np.array([1], "<i4").tobytes()
    with_spans = pb.ForwardBackwardRequest()
    with_spans.CopyFrom(plain)
    with_spans.data[0].model_input_spans.add().prompt_tokens.length = 1
    with_spans.data[0].loss_fn_input_spans.add().sampled_tokens.length = 1
    assert translate.digest(translate.forward_backward(parsed(plain))) == translate.digest(
        translate.forward_backward(parsed(with_spans))
    )


LOSSES = {spec.name: spec for spec in BUILTIN_LOSSES}
THRESHOLDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def stand_in(name: str = "gspo", **config: float) -> StandIn:
    settings = LossSettings(stable_reinforce=name, stable_reinforce_config=config)
    found = StandIn.of(settings, LOSSES)
    assert found is not None
    return found


def sampled_datum(
    *, prompt: int = 2, sampled: int = 2, advantages: tuple[float, ...] = (0.0, 1.0, 1.0)
) -> tinker.Datum:
    """Three tokens: a prompt of two and the first of two sampled ones, as the cookbook sends them."""
    plain = datum([1, 2, 3], target_tokens=[2, 3, 4], logprobs=[0.0, -1.0, -2.0], advantages=list(advantages))
    return plain.with_provenance(
        model_input=[
            tinker.types.PromptProvenanceSpan(sequence_id="r:0", length=prompt),
            tinker.types.SampledProvenanceSpan(sequence_id="r:0", length=sampled - 1),
        ],
        loss_fn_inputs=[
            tinker.types.PromptProvenanceSpan(sequence_id="r:0", offset=1, length=prompt - 1),
            tinker.types.SampledProvenanceSpan(sequence_id="r:0", length=sampled),
        ],
    )


def test_another_loss_stands_in_for_stable_reinforce() -> None:
    request = encoded([sampled_datum()], loss_fn="stable_reinforce")
    operation = translate.forward_backward(request, stand_in(**THRESHOLDS))
    assert (operation.loss_fn, operation.stands_in_for) == ("gspo", "stable_reinforce")
    assert operation.loss_fn_config == THRESHOLDS
    np.testing.assert_array_equal(operation.data[0].loss_inputs["sequence_ratio_mask"], [0, 1, 1])
    plain = translate.forward_backward(request, stand_in("ppo"))
    assert plain.data[0].loss_inputs.keys() == {"target_tokens", "logprobs", "advantages"}
    corrected = sampled_datum()
    corrected.loss_fn_inputs["rollout_logprobs"] = corrected.loss_fn_inputs["logprobs"]
    beside = translate.forward_backward(encoded([corrected], loss_fn="stable_reinforce"), stand_in("ppo"))
    np.testing.assert_array_equal(beside.data[0].loss_inputs["sequence_ratio_mask"], [0, 1, 1])
    assert decode_operation("forward_backward", encode_operation(operation)).stands_in_for == "stable_reinforce"
    with pytest.raises(UnsupportedError, match=r"loss_fn 'stable_reinforce' is not offered.*losses\.stable_reinforce"):
        translate.forward_backward(request)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (datum([1, 2, 3], target_tokens=[2, 3, 4]), "model_input_spans cover 0 of 3 tokens"),
        (sampled_datum(advantages=(0.5, 1.0, 1.0)), "advantages holds 0.5 at position 0, whose target was not sampled"),
    ],
)
def test_provenance_that_does_not_fit_is_refused(bad: tinker.Datum, words: str) -> None:
    with pytest.raises(UserError, match=rf"data\[1\]: .*{words}"):
        translate.forward_backward(encoded([sampled_datum(), bad], loss_fn="stable_reinforce"), stand_in("ppo"))


@pytest.mark.parametrize(
    ("length", "offset", "sequence", "words"),
    [
        (2, 0, "r:0", "cover 2 of 3"),
        (-1, 0, "r:0", "a span of -1 tokens"),
        (3, -1, "r:0", "from -1 on"),
        (3, 0, "", "needs a sequence_id"),
    ],
)
def test_a_span_that_names_no_tokens_is_refused(length: int, offset: int, sequence: str, words: str) -> None:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="stable_reinforce")
    message.data.add().model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    span = message.data[0].model_input_spans.add().sampled_tokens
    span.length, span.offset, span.sequence_id = length, offset, sequence
    with pytest.raises(UserError, match=rf"model_input_spans.*{words}"):
        translate.forward_backward(parsed(message), stand_in("ppo"))


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("cross_entropy", {}, "'cross_entropy' cannot stand in; use one of .*cispo.*gspo.*ppo"),
        ("no_such_loss", {}, "'no_such_loss' cannot stand in"),
        ("gspo", {"clip_low_threshold": 0.9}, "stable_reinforce_config: 'clip_high_threshold' is missing"),
        ("ppo", {"beta": 0.9}, "stable_reinforce_config: 'beta' is not a setting of 'ppo'; allowed: clip_high"),
    ],
)
def test_what_cannot_stand_in_is_refused_at_the_start(name: str, config: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stand_in(name, **config)


@pytest.mark.parametrize("field", ["image", "dmel"])
def test_chunks_that_are_no_text_are_refused_by_name(field: str) -> None:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    getattr(message.data.add().model_input.add(), field).SetInParent()
    with pytest.raises(UnsupportedError, match=rf"data\[0\]: model_input: {field} chunks are not offered"):
        translate.forward_backward(parsed(message))


def test_text_in_a_loss_config_is_refused_by_name() -> None:
    message = encoded([datum([1], target_tokens=[1], weights=[1.0])])
    message.head.loss_fn_config_v2["loss_id"].text = "abc"
    with pytest.raises(UnsupportedError, match="'loss_id' is text, 'abc'"):
        translate.forward_backward(message)


def test_a_loss_that_the_server_would_keep_is_refused_with_the_remedy() -> None:
    message = encoded([datum([1], target_tokens=[1])])
    message.head.loss_fn = "custom"
    message.head.loss_fn_config_v2["loss_id"].text = "s:loss:0"
    with pytest.raises(UnsupportedError, match=r"'custom' is not offered: .* `forward_backward_custom`"):
        translate.forward_backward(message)


@pytest.mark.parametrize("body", [b"", b"\x0a", b"garbage" * 1000, b'{"model_id": "x"}'])
def test_a_body_that_is_no_protobuf_is_the_users_fault(body: bytes) -> None:
    with pytest.raises(UserError):
        training_request.parse(body)


def test_tokens_of_a_broken_length_are_refused() -> None:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().encoded_text.tokens = b"abc"
    with pytest.raises(UserError, match=r"data\[0\]: model_input: 3 bytes are not a whole number of int32"):
        translate.forward_backward(parsed(message))


def test_our_module_and_the_sdks_agree_on_the_wire() -> None:
    """Both are imported in this process: no clash in the descriptor pool, and the same field numbers.

    Our own fields have numbers from 100 on.
    """
    for name, ours in pb.DESCRIPTOR.message_types_by_name.items():
        if name == "WeightsSpan":
            continue
        theirs = sdk_pb.DESCRIPTOR.message_types_by_name[name]
        assert {(f.name, f.number, f.type, f.is_repeated) for f in ours.fields if f.number < 100} == {
            (f.name, f.number, f.type, f.is_repeated) for f in theirs.fields
        }
    for name, ours in pb.DESCRIPTOR.enum_types_by_name.items():
        theirs = sdk_pb.DESCRIPTOR.enum_types_by_name[name]
        assert {(v.name, v.number) for v in ours.values} == {(v.name, v.number) for v in theirs.values}


# Models and weights ---------------------------------------------------------------------------------------------------


def create_request(**fields: object) -> wire.CreateModelRequest:
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"rank": 4}, **fields}
    return validated(wire.CreateModelRequest, body)


def test_a_missing_seed_is_the_same_for_a_repeat_and_another_for_another_model() -> None:
    first, again = translate.create_model(create_request()), translate.create_model(create_request())
    other = translate.create_model(create_request(model_seq_id=1))
    assert first == again
    assert first.model_id == "s:train:0"
    assert first.lora.seed != other.lora.seed
    assert 0 <= first.lora.seed < 2**63 - 1


def test_lora_flags_reach_the_operation() -> None:
    config = {"rank": 3, "seed": 9, "train_unembed": False, "train_mlp": False, "train_attn": True}
    assert translate.create_model(create_request(lora_config=config)).lora == ops.LoraConfig(
        rank=3, seed=9, train_unembed=False, train_mlp=False, train_attn=True
    )


def test_dimuon_and_full_fine_tuning_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'dimuon' is not offered"):
        translate.create_model(create_request(optimizer_config={"type": "dimuon", "version": 1}))
    with pytest.raises(UnsupportedError, match="lora_config is missing"):
        translate.create_model(create_request(lora_config=None))
    step = {"model_id": MODEL, "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
    with pytest.raises(UnsupportedError, match="optimizer_params: 'dimuon'"):
        translate.optim_step(validated(wire.OptimStepRequest, step))


def test_every_adam_field_arrives() -> None:
    params = tinker.AdamParams(learning_rate=1.0, beta1=0.1, beta2=0.2, eps=0.3, weight_decay=0.4, grad_clip_norm=0.5)
    body = tinker.types.OptimStepRequest(adam_params=params, model_id=MODEL, seq_id=2).model_dump()
    operation = translate.optim_step(validated(wire.OptimStepRequest, body))
    assert operation.adam == ops.AdamParams(**params.model_dump())


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".hidden", "", "/etc", "x" * 300])
def test_names_that_could_leave_their_directory_are_refused(name: str) -> None:
    request = wire.SaveWeightsRequest(model_id=MODEL, seq_id=1, path=name)
    with pytest.raises(UserError):
        translate.save_weights(request)


@pytest.mark.parametrize("ttl", [0, -1, 3599, 10 * 365 * 24 * 3600 + 1])
def test_lifetimes_out_of_range_are_refused(ttl: int) -> None:
    with pytest.raises(UserError, match=f"ttl_seconds is {ttl}"):
        translate.save_weights(wire.SaveWeightsRequest(model_id=MODEL, seq_id=1, path="x", ttl_seconds=ttl))


def sampler_request(**fields: object) -> wire.SaveWeightsForSamplerRequest:
    return validated(wire.SaveWeightsForSamplerRequest, {"model_id": MODEL, "seq_id": 4, **fields})


def test_a_sampler_is_persisted_by_name_or_ephemeral_by_number() -> None:
    persisted = translate.save_weights_for_sampler(sampler_request(path="x", ttl_seconds=3600), "s")
    assert persisted.path == "tinker://s:train:0/sampler_weights/x"
    assert persisted.ttl_seconds == 3600
    ephemeral = translate.save_weights_for_sampler(sampler_request(sampling_session_seq_id=7), "s")
    assert ephemeral.sampling_session_id == "s:sample:7"
    assert ephemeral.path is None


def test_a_retried_ephemeral_save_has_the_digest_of_the_first() -> None:
    first, again = (
        translate.save_weights_for_sampler(sampler_request(sampling_session_seq_id=number), "s") for number in (0, 1)
    )
    assert first != again
    assert translate.digest(first) == translate.digest(again)
    persisted = translate.save_weights_for_sampler(sampler_request(path="x"), "s")
    assert translate.digest(first) != translate.digest(persisted)
    inflight = translate.save_weights_for_sampler(sampler_request(sampling_session_seq_id=0, kind="inflight"), "s")
    assert inflight.snapshot_id == "s:sample:0.inflight"
    assert translate.digest(first) != translate.digest(inflight)


def test_what_a_sampler_cannot_be_is_refused_by_name() -> None:
    for fields, words in (
        ({"kind": "newest", "sampling_session_seq_id": 0}, "kind 'newest' is not offered; use one of 'snapshot', 'inf"),
        ({"kind": "inflight", "path": "x"}, "kind 'inflight' takes no path"),
        ({}, "path and sampling_session_seq_id are both missing"),
        ({"path": "x", "sampling_session_seq_id": 0}, "path and sampling_session_seq_id exclude each other"),
        ({"sampling_session_seq_id": 0, "ttl_seconds": 3600}, "ttl_seconds needs a name"),
    ):
        with pytest.raises(UserError, match=words):
            translate.save_weights_for_sampler(sampler_request(**fields), "s")


def test_recipients_that_nothing_can_be_encrypted_for_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    export = wire.SaveWeightsExternalRequest(model_id=MODEL, seq_id=1, path="x", age_encryption_recipients=["age1abc"])
    with pytest.raises(UserError, match="age_encryption_recipients: 'age1abc' is no public key of age"):
        translate.save_weights_external(export)
    monkeypatch.setitem(sys.modules, "pyrage", None)
    with pytest.raises(UnsupportedError, match=r"age_encryption_recipients .* pip install 'tinsmith\[age\]'"):
        translate.save_weights_external(export)


def test_foreign_tokens_and_other_kinds_are_refused_by_name() -> None:
    load = {"model_id": MODEL, "seq_id": 1, "path": "tinker://m/weights/x", "optimizer": True}
    with pytest.raises(UnsupportedError, match="weights_access_token"):
        translate.load_weights(validated(wire.LoadWeightsRequest, {**load, "weights_access_token": "t"}))
    with pytest.raises(UserError, match="is not a training checkpoint"):
        translate.load_weights(validated(wire.LoadWeightsRequest, {**load, "path": "tinker://m/sampler_weights/x"}))


# Sampling -------------------------------------------------------------------------------------------------------------


def sample_request(**fields: object) -> wire.SampleRequest:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}, {"type": "encoded_text", "tokens": [7]}]},
        "sampling_params": {"max_tokens": 5},
        "sampling_session_id": "s:sample:0",
        "seq_id": 7_000_000_000,
        **fields,
    }
    return validated(wire.SampleRequest, body)


def sample(request: wire.SampleRequest, max_context_tokens: int | None = None) -> ops.Sample:
    return translate.sample(
        request, sampling_session="s:sample:0", snapshot_id=None, max_context_tokens=max_context_tokens
    )


def test_a_sample_request_becomes_an_operation() -> None:
    operation = sample(sample_request(num_samples=2, prompt_logprobs=True, topk_sample_logprobs=2))
    np.testing.assert_array_equal(operation.prompt_P, np.array([5, 6, 7], np.int32))
    assert operation.prompt_P.dtype == np.int32
    assert operation.num_samples == 2
    assert operation.prompt_logprobs
    assert operation.topk_sample_logprobs == 2
    assert translate.digest(operation) == translate.digest(
        sample(sample_request(num_samples=2, prompt_logprobs=True, topk_sample_logprobs=2))
    )


@pytest.mark.parametrize(
    ("stop", "strings", "tokens", "at_eos"),
    [
        (None, (), (), True),
        ([], (), (), False),
        ("x", ("x",), (), True),
        (["x", "y"], ("x", "y"), (), True),
        ([3, 4], (), (3, 4), True),
    ],
)
def test_stops(stop: object, strings: tuple[str, ...], tokens: tuple[int, ...], at_eos: bool) -> None:
    params = sample(sample_request(sampling_params={"max_tokens": 1, "stop": stop})).params
    assert (params.stop_strings, params.stop_tokens, params.stop_at_eos) == (strings, tokens, at_eos)


@pytest.mark.parametrize("seed", [0, 2**40, 2**63 - 1, 2**64 - 1, -2, -(2**63)])
def test_any_seed_is_folded_into_63_bits(seed: int) -> None:
    params = sample(sample_request(sampling_params={"max_tokens": 1, "seed": seed})).params
    assert 0 <= params.seed < 2**63 - 1
    if 0 <= seed < 2**63 - 1:
        assert params.seed == seed


@pytest.mark.parametrize("missing", [{}, {"seed": None}, {"seed": -1}])
def test_a_missing_seed_depends_on_the_requests_ids_alone(missing: dict[str, Any]) -> None:
    def seed(**more: Any) -> int:
        return sample(sample_request(sampling_params={"max_tokens": 1, **missing}, **more)).params.seed

    assert seed() == seed()
    assert seed() != seed(seq_id=1)


def test_adapters_with_a_missing_seed_differ() -> None:
    def seed(number: int) -> int:
        model = {"session_id": "s", "model_seq_id": number, "base_model": "toy", "lora_config": {"rank": 4, "seed": -1}}
        return translate.create_model(wire.CreateModelRequest.model_validate(model)).lora.seed

    assert seed(0) == seed(0)
    assert seed(0) != seed(1)


def test_missing_max_tokens_fill_the_context_once_it_is_known() -> None:
    request = sample_request(sampling_params={})
    assert sample(request, 100).params.max_tokens == 97
    with pytest.raises(CapacityError, match="max_tokens is missing"):
        sample(request, None)


def test_target_tokens_come_dense_or_sparse() -> None:
    dense = {"data": [1, 2, -1, 3], "dtype": "int64", "shape": [2, 2]}
    sparse = {
        "data": [5],
        "dtype": "int64",
        "shape": [2, 3],
        "sparse_crow_indices": [0, 1, 1],
        "sparse_col_indices": [1],
    }
    np.testing.assert_array_equal(
        sample(sample_request(target_prompt_logprobs=dense)).target_prompt_logprobs, [[1, 2], [-1, 3]]
    )
    np.testing.assert_array_equal(
        sample(sample_request(target_prompt_logprobs=sparse)).target_prompt_logprobs, [[-1, 5, -1], [-1, -1, -1]]
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"record_stability_info": True}, "record_stability_info is not offered.*losses.stable_reinforce"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 10**9}, "num_samples is 1000000000"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "'image' chunks are not offered"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**40]}]}}, "token id 1099511627776"),
        ({"sampling_params": {"max_tokens": 1, "stop": ""}}, "empty string"),
        ({"sampling_params": {"max_tokens": 1, "stop": [2**50]}}, "stop holds a token id"),
        ({"target_prompt_logprobs": {"data": [1.0], "dtype": "float32", "shape": [1, 1]}}, "send int64"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 2]}}, "does not hold 1 values"),
        ({"target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [0, 2**40, 2**40]}}, "is not supported"),
        (
            {
                "target_prompt_logprobs": {
                    "data": [1, 2, 3, 4],
                    "dtype": "int64",
                    "shape": [2, 3],
                    "sparse_crow_indices": [0, 1, 4],
                    "sparse_col_indices": [1, 2, 0, 2],
                }
            },
            "has several values for row 1, column 2",
        ),
        (
            {
                "target_prompt_logprobs": {
                    "data": [1],
                    "dtype": "int64",
                    "shape": [2**20, 2**20],
                    "sparse_crow_indices": [0, 1],
                    "sparse_col_indices": [0],
                }
            },
            "more than",
        ),
    ],
)
def test_bad_samples_are_refused_with_the_field_named(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        sample(sample_request(**fields))


@pytest.mark.parametrize(("shape", "values"), [([0, 2**31 - 1, 2**31 - 1], 0), ([1] * 65, 1)])
def test_a_shape_that_no_array_can_have_is_refused(shape: list[int], values: int) -> None:
    tensor = pb.Tensor(dense=bytes(8 * values), dtype=pb.DTYPE_INT64, shape=shape)
    with pytest.raises(UserError, match=r"target_tokens: shape .* is not supported"):
        tensor_from_proto("target_tokens", tensor)
