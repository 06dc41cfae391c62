"""What no SDK sends is refused wherever it would be without effect, and what every SDK sends is not."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError

from tinsmith.errors import UnsupportedError
from tinsmith.protocol import translate, wire
from tinsmith.protocol.unknown_fields import SDK_VERSIONS, UnknownField, UnknownFieldError, validated
from tinsmith.server.metrics import MOST_NAMES, UnknownFieldCounts

OF_SDKS: dict[str, Any] = json.loads(Path(__file__).with_name("fields_of_sdks.json").read_text())
"""Read from the types of these releases; each field with the first and the last that has it."""

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
NUMBERED = {"model_id": "s:train:0", "seq_id": 1}
CREATION = {"session_id": "s", "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}
TENSOR = {"data": [1], "dtype": "int64"}
SAMPLE = {"sampling_session_id": "s", "seq_id": 0, "prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
LOGGED = {"points": [{"step": 0, "values": {"reward": None}}]}
SEARCH = {
    "owner": {"type": "own"},
    "cursor": {"last_created_at": "2026-11-27T12:00:00Z", "last_session_id": "s", "last_checkpoint_uuid": "tinker://s"},
}
SESSIONS = {**SEARCH, "cursor": {k: v for k, v in SEARCH["cursor"].items() if k != "last_checkpoint_uuid"}}
CHECKPOINTS = {**SEARCH, "cursor": {k: v for k, v in SEARCH["cursor"].items() if k != "last_session_id"}}
DATUM = {"model_input": PROMPT, "loss_fn_inputs": {"target_tokens": TENSOR}}
SPANS = {"model_input_spans": [{"prompt_tokens": {"sequence_id": "s", "length": 2}}]}
PASS = {**NUMBERED, "forward_backward_input": {"data": [{**DATUM, **SPANS}], "loss_fn": "cross_entropy"}}
IN_DATUM: list[tuple[str | int, ...]] = [
    (),
    ("model_input",),
    ("model_input", "chunks", 0),
    ("loss_fn_inputs", "target_tokens"),
    ("model_input_spans", 0),
    ("model_input_spans", 0, "prompt_tokens"),
]
UPLOAD = {"base_model": "toy", "lora_config": {"rank": 4}}
BODIES: list[tuple[type[BaseModel], dict[str, Any], tuple[str | int, ...]]] = [
    (wire.CreateModelRequest, CREATION, ()),
    (wire.CreateModelRequest, CREATION, ("lora_config",)),
    (wire.CreateModelRequest, {**CREATION, "optimizer_config": {"type": "adamw"}}, ("optimizer_config",)),
    (wire.OptimStepRequest, {**NUMBERED, "adam_params": {}}, ()),
    (wire.OptimStepRequest, {**NUMBERED, "adam_params": {}}, ("adam_params",)),
    (wire.SaveWeightsRequest, {**NUMBERED, "path": "a"}, ()),
    (wire.SaveWeightsForSamplerRequest, {**NUMBERED, "path": "a"}, ()),
    (wire.SaveWeightsExternalRequest, {**NUMBERED, "path": "a"}, ()),
    (wire.LoadWeightsRequest, {**NUMBERED, "path": "a", "optimizer": True}, ()),
    (wire.LoadWeightsRequest, {"path": "a", "optimizer": True, "optimizer_config": {}}, ("optimizer_config",)),
    (wire.CreateSamplingSessionRequest, {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "toy"}, ()),
    (wire.SampleRequest, SAMPLE, ()),
    (wire.SampleRequest, SAMPLE, ("sampling_params",)),
    (wire.SampleRequest, SAMPLE, ("prompt",)),
    (wire.SampleRequest, SAMPLE, ("prompt", "chunks", 0)),
    (wire.SampleRequest, {**SAMPLE, "target_prompt_logprobs": TENSOR}, ("target_prompt_logprobs",)),
    (wire.ForwardBackwardRequest, PASS, ()),
    (wire.ForwardBackwardRequest, PASS, ("forward_backward_input",)),
    *((wire.ForwardBackwardRequest, PASS, ("forward_backward_input", "data", 0, *place)) for place in IN_DATUM),
    (wire.LogMetricsRequest, LOGGED, ()),
    (wire.LogMetricsRequest, LOGGED, ("points", 0)),
    (wire.LogRewardsRequest, {"step": 0, "rewards": {"0" * 32: 1.0}}, ()),
    (wire.NewApiKey, {"name": "a"}, ()),
    (wire.CopyWeightsRequest, {"source_path": "tinker://s:train:0/weights/a"}, ()),
    (wire.UploadStartRequest, UPLOAD, ()),
    (wire.UploadStartRequest, UPLOAD, ("lora_config",)),
    (wire.UploadFinishRequest, {"upload_id": "u"}, ()),
    *((wire.SessionSearchRequest, SESSIONS, place) for place in ((), ("owner",), ("cursor",))),
    *((wire.CheckpointSearchRequest, CHECKPOINTS, place) for place in ((), ("owner",), ("cursor",))),
    *(
        (wire.SessionSearchRequest, {"statuses": [{"type": status}]}, ("statuses", 0))
        for status in ("active", "cancelled", "failed", "client_finished")
    ),
    (wire.SessionSearchRequest, {"owner": {"type": "accessible"}}, ("owner",)),
    (wire.SessionSearchRequest, {"owner": {"type": "user", "owner_urns": ["u"]}}, ("owner",)),
]
"""Every message of a body that changes numbers, and where in the body it is."""


def with_field(body: dict[str, Any], place: tuple[str | int, ...], name: str, value: object) -> dict[str, Any]:
    changed = json.loads(json.dumps(body))
    inner = changed
    for step in place:
        inner = inner[step]
    inner[name] = value
    return changed


@pytest.mark.parametrize(("model", "body", "place"), BODIES)
def test_an_unknown_field_is_refused_by_name_unless_it_holds_nothing(
    model: type[BaseModel], body: dict[str, Any], place: tuple[str | int, ...]
) -> None:
    plain = validated(model, with_field(body, place, "unused", None))
    for nothing in (None, False, 0, 0.0, "", [], {}):
        assert repr(validated(model, with_field(body, place, "new_field", nothing))) == repr(plain)
    for something in (True, 1, -1e-9, "x", "0", [0], [None], {"a": None}):
        with pytest.raises(
            UnknownFieldError, match=r"new_field' \(.* is not known, .*SDK 0\.22\.3 to 0\.38"
        ) as refused:
            validated(model, with_field(body, place, "new_field", something))
        (field,) = refused.value.fields
        assert field.name == "new_field"


def test_every_body_that_changes_numbers_is_tried() -> None:
    exact = {each.__name__ for each in vars(wire).values() if _is_exact(each)} - {"ExactBody"}
    tried = {model.__name__ for model, _, _ in BODIES}
    inner = {
        "LoraConfig",
        "OptimizerConfig",
        "AdamParams",
        "SamplingParams",
        "ModelInput",
        "Chunk",
        "TensorData",
        "Datum",
        "ForwardBackwardInput",
        "ProvenanceSpan",
        "TokenSpan",
        "LoggedPoint",
        "SessionCursor",
        "CheckpointCursor",
        "OwnSearchOwner",
        "AccessibleSearchOwner",
        "UserSearchOwner",
        "ActiveStatusQuery",
        "CancelledStatusQuery",
        "FailedStatusQuery",
        "ClientFinishedStatusQuery",
    }
    assert exact == tried | inner


def _is_exact(each: object) -> bool:
    return isinstance(each, type) and issubclass(each, BaseModel) and each.model_config.get("extra") == "forbid"


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (wire.CreateSessionRequest, {}),
        (wire.SessionRequest, {"session_id": "s"}),
        (wire.TelemetryRequest, {}),
        (wire.ClientConfigRequest, {}),
        (wire.RetrieveFutureRequest, {"request_id": "r"}),
    ],
)
def test_what_changes_no_number_may_have_new_fields(model: type[BaseModel], body: dict[str, Any]) -> None:
    assert validated(model, {**body, "new_field": True}) == validated(model, body)


def test_the_message_names_all_and_what_was_meant() -> None:
    lora = {"rank": 4, "alpha": 64, "train_mpl": True, "precision": "fp8"}
    with pytest.raises(UnknownFieldError) as refused:
        validated(wire.CreateModelRequest, {**CREATION, "lora_config": lora})
    allowed = "allowed: rank, seed, train_unembed, train_mlp, train_attn"
    assert str(refused.value) == (
        f"'lora_config.alpha' (64) is not known, {allowed}; 'lora_config.train_mpl' (True) is not known, did you mean "
        f"'train_mlp'?; 'lora_config.precision' ('fp8') is not known, {allowed}; this server knows the fields of SDK "
        f"{SDK_VERSIONS}, and any other would have no effect: remove it"
    )


def test_a_request_for_another_endpoint_is_refused() -> None:
    with pytest.raises(ValidationError, match="'optim_step'"):
        validated(wire.OptimStepRequest, {**NUMBERED, "type": "save_weights"})


@pytest.mark.parametrize("chunk", [{"type": "image", "data": "x", "format": "png"}, {"type": "video", "frames": [1]}])
def test_chunks_of_other_types_are_refused_by_their_type(chunk: dict[str, Any]) -> None:
    body = validated(wire.SampleRequest, {**SAMPLE, "prompt": {"chunks": [dict(chunk)]}})
    with pytest.raises(UnsupportedError, match=f"'{chunk['type']}' chunks are not offered"):
        translate.sample(body, sampling_session="s", snapshot_id=None, max_context_tokens=10)
    untyped = {**chunk, "type": None}
    for ordered in (untyped, dict(reversed(untyped.items()))):
        with pytest.raises(UnknownFieldError):
            validated(wire.SampleRequest, {**SAMPLE, "prompt": {"chunks": [ordered]}})


def test_other_optimizers_are_refused_by_their_type() -> None:
    body = validated(wire.CreateModelRequest, {**CREATION, "optimizer_config": {"type": "dimuon", "version": 1}})
    with pytest.raises(UnsupportedError, match="'dimuon' is not offered"):
        translate.create_model(body)


# What SDKs send -------------------------------------------------------------------------------------------------------

OURS = {
    "AdamOptimizerConfig": wire.OptimizerConfig,
    "EncodedTextChunk": wire.Chunk,
    **{name: getattr(wire, name) for name in OF_SDKS["fields"] if hasattr(wire, name)},
}


@pytest.mark.parametrize("message", OF_SDKS["fields"])
def test_every_field_that_an_sdk_ever_had_is_known(message: str) -> None:
    on_the_wire = {"optim_params": "adam_params"}
    sent = {on_the_wire.get(name, name) for name in OF_SDKS["fields"][message]}
    assert sent <= OURS[message].model_fields.keys()


def test_the_versions_are_those_that_are_tried() -> None:
    assert SDK_VERSIONS.split(" to ")[1] == version("tinker") == OF_SDKS["releases"][-1]


# Nulls ----------------------------------------------------------------------------------------------------------------


def optional_fields() -> list[tuple[type[BaseModel], str]]:
    models = [each for each in vars(wire).values() if isinstance(each, type) and issubclass(each, wire.Body)]
    return [(model, name) for model in models for name, field in model.model_fields.items() if not field.is_required()]


LEAST: dict[type[BaseModel], dict[str, Any]] = {
    **{model: body for model, body, place in BODIES if not place},
    wire.LoraConfig: {"rank": 4},
    wire.TensorData: TENSOR,
    wire.ModelInput: PROMPT,
    wire.TokenSpan: {"sequence_id": "s", "length": 2},
    wire.Datum: DATUM,
    wire.ForwardBackwardInput: {"data": [DATUM], "loss_fn": "cross_entropy"},
    wire.FinishSessionRequest: {"reason": {"type": "success"}},
    wire.RetrieveFutureRequest: {"request_id": "r"},
    wire.RetrieveFuturesRequest: {"target": {"sampling_session_id": "s"}},
    wire.SamplingSessionTarget: {"sampling_session_id": "s"},
    wire.ClientFinishedStatusQuery: {"type": "client_finished"},
}


@pytest.mark.parametrize(("model", "name"), optional_fields())
def test_null_counts_as_left_out_unless_it_may_be_nan(model: type[BaseModel], name: str) -> None:
    body = {key: value for key, value in LEAST.get(model, {}).items() if key != name}
    if model.model_fields[name].annotation is float:  # the SDK sends NaN as null
        with pytest.raises(ValidationError, match="valid number"):
            validated(model, {**body, name: None})
    else:
        assert repr(validated(model, {**body, name: None})) == repr(validated(model, body))


# Counts ---------------------------------------------------------------------------------------------------------------


def test_names_that_clients_make_up_are_counted_in_bounded_room() -> None:
    registry = CollectorRegistry()
    counts = UnknownFieldCounts(registry)
    counts.count([UnknownField("SamplingParams", "min_p")])
    for number in range(3 * MOST_NAMES):
        counts.count([UnknownField("LoraConfig", f"made_up_{number}")])
    counts.count([UnknownField("SamplingParams", "min_p"), UnknownField("LoraConfig", 'x"\n')])
    counts.count([UnknownField("LoraConfig", "x" * 1000)])
    lines = [line for line in generate_latest(registry).decode().splitlines() if "_total{" in line]
    assert len(lines) == MOST_NAMES + 1
    assert 'tinsmith_unknown_fields_total{field="min_p",message="SamplingParams"} 2.0' in lines
    others = 3 * MOST_NAMES - (MOST_NAMES - 1) + 2
    assert f'tinsmith_unknown_fields_total{{field="(other)",message="LoraConfig"}} {others}.0' in lines
