"""What happens to every field that SDK 0.38.0 can send: it is honoured, refused by name, or has no meaning here.

Nothing deviates silently. A test walks the SDK's own types and calls and fails if one of their fields is not listed;
`generate.py` writes the table into reference/protocol.md.
"""

from dataclasses import dataclass
from typing import Literal

from tinsmith.server.context import API_PREFIX
from tinsmith.server.routes import service


@dataclass(frozen=True, slots=True)
class Status:
    verdict: Literal["honoured", "refused", "no meaning"]
    note: str = ""


def _honoured(note: str = "") -> Status:
    return Status("honoured", note)


def _refused(note: str) -> Status:
    return Status("refused", note)


def _no_meaning(note: str) -> Status:
    return Status("no meaning", note)


_TAG = _no_meaning("a constant that repeats the endpoint")
# What is refused, whatever it holds: a test counts these
_OPTIMIZER = _refused("optimizers other than AdamW, such as `dimuon`: no backend has one")
_CUSTOM_LOSS = _refused(service.NOT_OFFERED["POST /create_custom_loss"])
_TOKEN = _refused("access tokens for weights: publish the checkpoint instead")
_NO_SESSION = _refused("samples without a sampling session: create a sampling client, as the SDK does")
_DROPPED = _no_meaning("telemetry is accepted and dropped")
_SPAN = _honoured("of `stable_reinforce`, if another loss stands in for it; without a meaning for other losses")
_LIMIT = _honoured("1 to 1000, else refused")
_SCOPE = _honoured("`owned`, or `accessible`: an administrator then sees every tenant's")
_EVENT = ("event", "event_id", "event_session_index", "severity", "timestamp")  # fields of every telemetry event
_IMAGE = _refused("image and dmel chunks: all models are of text")

_SHOWN = 3  # of the places where something is refused

FIELDS: dict[str, dict[str, Status]] = {
    # Sessions and configuration
    "ClientConfigRequest": {"sdk_version": _no_meaning("every SDK gets the same configuration")},
    "CreateSessionRequest": {
        "tags": _honoured("stored"),
        "user_metadata": _honoured("stored, any JSON values; returned as strings"),
        "sdk_version": _honoured("stored"),
        "project_id": _honoured("a label; `training_runs` can filter by it"),
        "display_name": _honoured("stored"),
        "type": _TAG,
    },
    "SessionHeartbeatRequest": {"session_id": _honoured(), "type": _TAG},
    "SessionSearchRequest": {
        "session_id": _honoured("or `display_name`"),
        "project_ids": _honoured("labels; one that nobody uses finds nothing"),
        "user_metadata": _honoured("as text"),
        "display_name": _honoured(),
        "owner": _honoured(),
        "statuses": _honoured(),
        "limit": _honoured("1 to 200; a page may be shorter although more follow"),
        "cursor": _honoured(),
    },
    "OwnSearchOwner": {"type": _honoured()},
    "AccessibleSearchOwner": {"type": _honoured("an administrator then sees every tenant's")},
    "UserSearchOwner": {"type": _honoured(), "owner_urns": _honoured("tenants, as `model_owner` names them")},
    "ActiveSessionStatusQuery": {"type": _honoured()},
    "CancelledSessionStatusQuery": {"type": _honoured("finds nothing: nobody can cancel a session")},
    "FailedSessionStatusQuery": {"type": _honoured("finds nothing: no session fails as a whole")},
    "ClientFinishedSessionStatusQuery": {"type": _honoured(), "reasons": _honoured()},
    "SessionSearchCursor": {"last_created_at": _honoured(), "last_session_id": _honoured()},
    # Models and training
    "CreateModelRequest": {
        "session_id": _honoured(),
        "model_seq_id": _honoured(),
        "base_model": _honoured("a configured one, also as `BASE:peft:N` if its context has N tokens; else refused"),
        "user_metadata": _honoured("stored, any JSON values; returned as strings"),
        "lora_config": _honoured("required; full fine-tuning is rank 0"),
        "optimizer_config": _honoured("`adamw`; other families are refused"),
        "type": _TAG,
    },
    "LoraConfig": {
        "rank": _honoured(
            "1 up to the backend's limit, any whole number; 0 is full fine-tuning, if the backend offers it"
        ),
        "seed": _honoured("drawn from the model id if absent or -1"),
        "train_unembed": _honoured(),
        "train_mlp": _honoured(),
        "train_attn": _honoured("all three false is refused"),
    },
    "AdamOptimizerConfig": {"type": _honoured()},
    "OptimizerConfigBase": {"type": _OPTIMIZER},
    "DimuonOptimizerConfig": {
        "type": _OPTIMIZER,
        "version": _OPTIMIZER,
    },
    "GetInfoRequest": {"model_id": _honoured(), "type": _TAG},
    "UnloadModelRequest": {"model_id": _honoured(), "type": _TAG},
    "OptimStepRequest": {
        "optim_params": _honoured("as `adam_params`; `optimizer_params` is refused"),
        "model_id": _honoured(),
        "seq_id": _honoured("required"),
        "type": _TAG,
    },
    "AdamParams": {
        "learning_rate": _honoured(),
        "beta1": _honoured(),
        "beta2": _honoured(),
        "eps": _honoured(),
        "weight_decay": _honoured(),
        "grad_clip_norm": _honoured(),
    },
    "OptimParamsBase": {"type": _OPTIMIZER},
    "DimuonParams": dict.fromkeys(("type", "learning_rate", "grad_clip_norm", "beta1"), _OPTIMIZER),
    # Protobuf: forward_backward
    "proto ForwardBackwardRequest": {
        "model_id": _honoured(),
        "seq_id": _honoured(),
        "data": _honoured(),
        "loss_fn": _honoured(
            "a loss of the backend; `stable_reinforce` if another loss stands in for it; `custom` with the id of one "
            "that was created"
        ),
        "loss_fn_config": _honoured("unknown keys are refused"),
        "forward_only": _honoured(),
        "loss_fn_config_v2": _honoured("preferred; the only text is `loss_id` of `custom`"),
    },
    "proto LossConfigValue": {"number": _honoured(), "text": _CUSTOM_LOSS},
    "proto Datum": {
        "model_input": _honoured("text chunks are concatenated"),
        "loss_fn_inputs": _honoured("the inputs of the loss; `weights` of `cross_entropy` default to 1.0"),
        "model_input_spans": _SPAN,
        "loss_fn_input_spans": _SPAN,
    },
    "proto ProvenanceSpan": {"prompt_tokens": _SPAN, "sampled_tokens": _SPAN},
    "proto PromptProvenanceSpan": {"sequence_id": _SPAN, "offset": _SPAN, "length": _SPAN},
    "proto SampledProvenanceSpan": {"sequence_id": _SPAN, "offset": _SPAN, "length": _SPAN},
    "proto Chunk": {"encoded_text": _honoured(), "image": _IMAGE, "dmel": _IMAGE},
    "proto EncodedTextChunk": {"tokens": _honoured()},
    "proto ImageChunk": dict.fromkeys(("data", "format", "expected_tokens", "override_dimensions"), _IMAGE),
    "proto ImageDimensions": {"width": _IMAGE, "height": _IMAGE},
    "proto DmelChunk": {"dmel": _IMAGE},
    "proto Tensor": {
        "dense": _honoured(),
        "sparse_csr": _honoured("made dense; missing cells are 0"),
        "dtype": _honoured("int32 and bfloat16 are widened"),
        "shape": _honoured("one dimension if absent"),
    },
    "proto SparseCsr": {"values": _honoured(), "crow_indices": _honoured(), "col_indices": _honoured()},
    # Weights
    "SaveWeightsRequest": {
        "model_id": _honoured(),
        "path": _honoured("required: the checkpoint's name"),
        "seq_id": _honoured("required"),
        "ttl_seconds": _honoured("3600 to ten years, else refused"),
        "overwrite": _honoured(
            "replaces the content, the metadata and the expiry time; a published path stays published"
        ),
        "user_metadata": _honoured(),
        "type": _TAG,
    },
    "SaveWeightsForSamplerRequest": {
        "model_id": _honoured(),
        "path": _honoured("persisted with a path, ephemeral without"),
        "sampling_session_seq_id": _honoured("ephemeral only; the first of a retried request wins"),
        "kind": _honoured("`snapshot`; or `inflight`, without a path"),
        "seq_id": _honoured("required"),
        "ttl_seconds": _honoured("refused if ephemeral"),
        "user_metadata": _honoured("refused if ephemeral"),
        "type": _TAG,
    },
    "SaveWeightsExternalRequest": {
        "model_id": _honoured(),
        "path": _honoured("required"),
        "seq_id": _honoured("required"),
        "ttl_seconds": _honoured("3600 to ten years, else refused"),
        "age_encryption_recipients": _honoured(
            "files then end in `.age`; refused if the server has no pyrage (`tinsmith[age]`)"
        ),
        "type": _TAG,
    },
    "LoadWeightsRequest": {
        "model_id": _honoured("an existing model"),
        "seq_id": _honoured("an existing model"),
        "session_id": _honoured("a new model"),
        "model_seq_id": _honoured("a new model"),
        "base_model": _honoured("must be the checkpoint's own; refused with model_id"),
        "user_metadata": _honoured("of a new model; refused with model_id"),
        "path": _honoured("one's own, or published"),
        "optimizer": _honoured(),
        "optimizer_config": _honoured("`adamw`; other families are refused"),
        "weights_access_token": _TOKEN,
        "type": _TAG,
    },
    "CopyWeightsRequest": {
        "session_id": _honoured("with `model_seq_id`: the copy is of that number"),
        "model_seq_id": _honoured("with `session_id`"),
        "destination_project_id": _honoured("a label: the copy is in a new session, which has ended"),
        "source_path": _honoured("one's own, or published"),
        "ttl_seconds": _honoured("3600 to ten years, else refused; not inherited"),
        "weights_access_token": _TOKEN,
    },
    "CreateCustomLossRequest": dict.fromkeys(
        ("session_id", "custom_loss_seq_id", "name", "inputs", "graph", "type"), _CUSTOM_LOSS
    ),
    "CustomLossInput": dict.fromkeys(("name", "rank"), _CUSTOM_LOSS),
    "CustomLossGraph": dict.fromkeys(("format", "nodes"), _CUSTOM_LOSS),
    "CustomLossNode": dict.fromkeys(("op", "name", "target", "args", "kwargs"), _CUSTOM_LOSS),
    # Sampling
    "CreateSamplingSessionRequest": {
        "session_id": _honoured(),
        "sampling_session_seq_id": _honoured(),
        "base_model": _honoured("with model_path it must be the checkpoint's own"),
        "model_path": _honoured("a sampler checkpoint, one's own or published"),
        "type": _TAG,
    },
    "JoinSamplingSessionRequest": {"sampling_session_id": _honoured(), "type": _TAG},
    "SampleRequest": {
        "num_samples": _honoured("1 to 1024"),
        "prompt": _honoured("text chunks are concatenated"),
        "sampling_params": _honoured(),
        "base_model": _NO_SESSION,
        "model_path": _NO_SESSION,
        "sampling_session_id": _honoured("required"),
        "seq_id": _honoured("required, 64 bits"),
        "prompt_logprobs": _honoured(),
        "topk_prompt_logprobs": _honoured("as many as the sampler returns and the trainer takes as targets"),
        "topk_sample_logprobs": _honoured("as many as the sampler returns and the trainer takes as targets"),
        "target_prompt_logprobs": _honoured(
            "if the sampler offers it; answered in the layout of the request, dense or sparse"
        ),
        "prompt_alt_tokens_k": _honoured("as many as the sampler draws; `jax` and `toy` draw up to 64, `vllm` none"),
        "prompt_logprobs_last_n": _honoured(),
        "record_stability_info": _honoured("refused unless another loss stands in for `stable_reinforce`"),
        "type": _TAG,
    },
    "SamplingParams": {
        "max_tokens": _honoured("absent: up to the context length"),
        "seed": _honoured("folded into 0 to 2**63 - 2; drawn from the request's ids if absent or -1"),
        "stop": _honoured("added to EOS; an empty list switches EOS off too"),
        "temperature": _honoured("0 is greedy"),
        "top_k": _honoured("-1 is off"),
        "top_p": _honoured(),
    },
    "ModelInput": {"chunks": _honoured()},
    "EncodedTextChunk": {"tokens": _honoured(), "type": _honoured()},
    "ImageChunk": dict.fromkeys(("data", "format", "expected_tokens", "type"), _IMAGE),
    "ImageAssetPointerChunk": dict.fromkeys(("format", "location", "expected_tokens", "type"), _IMAGE),
    "DmelChunk": {"dmel": _IMAGE, "type": _IMAGE},
    "TensorData": {
        "data": _honoured(),
        "dtype": _honoured("int64 for token ids"),
        "shape": _honoured(),
        "sparse_crow_indices": _honoured(),
        "sparse_col_indices": _honoured(),
    },
    # Futures
    "FutureRetrieveRequest": {"request_id": _honoured(), "allow_metadata_only": _honoured("results over 4 MiB")},
    "FuturesRetrieveRequest": {
        "target": _honoured(),
        "prev_cursor": _honoured("valid across restarts; one that is ahead of the records is refused"),
        "timeout": _honoured("0 answers at once; more than `server.long_poll_s` is answered after that"),
        "retrieved_request_ids": _no_meaning("results stay readable for `server.result_retention_s`"),
    },
    "SamplingSessionFuturesTarget": {
        "type": _honoured(),
        "sampling_session_id": _honoured(),
        "cloned_sampler_id": _honoured("every clone has its own completions and cursor"),
    },
    # Beside the work
    "TelemetrySendRequest": dict.fromkeys(
        ("events", "platform", "sdk_version", "session_id", "process_uuid"), _DROPPED
    ),
    "SessionStartEvent": dict.fromkeys(_EVENT, _DROPPED),
    "SessionEndEvent": dict.fromkeys((*_EVENT, "duration"), _DROPPED),
    "UnhandledExceptionEvent": dict.fromkeys((*_EVENT, "error_message", "error_type", "traceback"), _DROPPED),
    "GenericEvent": dict.fromkeys((*_EVENT, "event_name", "event_data"), _DROPPED),
    "GetBillingUsageRequest": dict.fromkeys(
        ("starting_on", "ending_before"),
        _honoured("in UTC, also without a zone; in whole hours: all that the window touches"),
    ),
    "GetCurrentCheckpointStorageUsageRequest": {"project_id": _honoured()},
    # Bodies that are no class of the SDK, and query parameters
    "POST /api/v1/sessions/{session_id}/finish": {
        "reason.type": _honoured("`success`, `errored` or `interrupted`; the first reason wins"),
        "detail": _honoured("stored"),
    },
    "PUT /api/v1/sessions/{session_id}/project": {"project_id": _honoured("a label; `training_runs` can filter by it")},
    "POST /api/v1/cancel_future": {"request_id": _honoured("cancels a sample; a training request is left as it is")},
    "POST /api/v1/weights_info": {"tinker_path": _honoured("one's own, or published")},
    "PUT /api/v1/training_runs/{training_run_id}/checkpoints/{checkpoint_id}/ttl": {
        "ttl_seconds": _honoured("3600 to ten years from now, else refused; null for ever")
    },
    "GET /api/v1/sessions": {"limit": _LIMIT, "offset": _honoured(), "access_scope": _SCOPE},
    "GET /api/v1/sessions/{session_id}": {"access_scope": _SCOPE},
    "GET /api/v1/training_runs": {
        "limit": _LIMIT,
        "offset": _honoured(),
        "access_scope": _SCOPE,
        "project_id": _honoured(),
    },
    "GET /api/v1/training_runs/{training_run_id}": {"access_scope": _SCOPE},
    "GET /api/v1/checkpoints": {"limit": _LIMIT, "offset": _honoured()},
    "GET /api/v1/audit": {
        "event_type": _honoured("`teams` and `organizations` find nothing: there are no such events"),
        "day": _honoured("in UTC; today without one"),
    },
}

NOT_OFFERED: dict[str, Status] = {
    call.replace(" ", f" {API_PREFIX}"): _refused(reason) for call, reason in service.NOT_OFFERED.items()
}
"""Endpoints of the SDK that answer with their reason alone."""


def refusals() -> dict[str, list[str]]:
    """Return what is refused, whatever it holds, and why; and where the SDK has it."""
    found: dict[str, list[str]] = {}
    for call, status in NOT_OFFERED.items():
        found.setdefault(status.note, []).append(f"`{call}`")
    for message, fields in FIELDS.items():
        for name, status in fields.items():
            if status.verdict == "refused":
                found.setdefault(status.note, []).append(f"`{message}.{name}`")
    return found


def refused_lines() -> str:
    """Return the list of docs/reference/protocol.md."""
    lines = ["| Refused, and why | Where |", "|---|---|"]
    for note, where in refusals().items():
        shown = where if len(where) <= _SHOWN else [*where[:_SHOWN], "..."]
        lines.append(f"| {note} | {', '.join(shown)} |")
    return "\n".join(lines)


def markdown() -> str:
    """Return the table of docs/reference/protocol.md."""
    lines = ["| Message | Field | Status | Note |", "|---|---|---|---|"]
    for message, fields in FIELDS.items():
        for name, status in fields.items():
            lines.append(f"| {message} | `{name}` | {status.verdict} | {status.note} |")
    return "\n".join(lines)
