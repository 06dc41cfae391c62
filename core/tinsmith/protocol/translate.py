"""Turns requests of the Tinker API into operations. Pure: no store, no clock. Refusals name the field.

The same request always gives the same operation, bit for bit: maps are sorted, and a seed that the client did not send
is derived from ids that a retry repeats. `digest` of the operation is therefore what a repeat is compared by.
"""

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import replace
from math import isnan

from tinsmith import operations as ops
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import CapacityError, UnsupportedError, UserError
from tinsmith.protocol import stable_reinforce, wire
from tinsmith.protocol import tensors as wire_tensors
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.protocol.stable_reinforce import StandIn
from tinsmith.protocol.training_request import TrainingRequest
from tinsmith.ranges import NUM_SAMPLES, TTL_SECONDS
from tinsmith.store.canonical import add_canonical
from tinsmith.store.codec import kind_of
from tinsmith_checkpoints.age_files import read_recipients

_KINDS = ("snapshot", "inflight")
CUSTOM_LOSSES_RUN_IN_CLIENTS = (
    "losses that a server keeps for clients: call `forward_backward_custom` with the function, which computes the loss "
    "in the client, or install a plugin with the loss"
)
_CUSTOM = "custom"
"""The loss_fn of requests that name a loss which the server keeps."""


def digest(op: ops.Operation) -> bytes:
    """Hash what a repeat must match: the operation without the ids that the SDK draws anew for a retry."""
    content = replace(op, sampling_session_id="") if isinstance(op, ops.SaveForSampler) and not op.path else op
    digest = hashlib.sha256(kind_of(op).encode() + b"\0")
    add_canonical(content, digest.update)
    return digest.digest()


def model_id(session_id: str, model_seq_id: int) -> str:
    """Name a model as the SDK itself does when it creates one from a checkpoint."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


# Models ---------------------------------------------------------------------------------------------------------------


def create_model(request: wire.CreateModelRequest) -> ops.CreateModel:
    check_optimizer(request.optimizer_config)
    if request.lora_config is None:
        msg = "lora_config is missing; send one (rank 0 is full fine-tuning, if the base model offers it)"
        raise UnsupportedError(msg)
    config, name = request.lora_config, model_id(request.session_id, request.model_seq_id)
    seed = _derived_seed(name) if config.seed is None else config.seed
    lora = ops.LoraConfig(
        rank=config.rank,
        seed=seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
    )
    return ops.CreateModel(model_id=name, lora=lora)


def check_optimizer(config: wire.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        msg = f"optimizer_config: {config.type!r} is not offered; use 'adamw'"
        raise UnsupportedError(msg)


def check_load(request: wire.LoadWeightsRequest) -> None:
    """Check what both forms of load_weights share."""
    check_optimizer(request.optimizer_config)
    if request.weights_access_token is not None:
        msg = "weights_access_token is not offered; load your own or a published checkpoint without one"
        raise UnsupportedError(msg)
    if TinkerPath.parse(request.path).kind == "sampler":
        msg = f"path {request.path!r} is not a training checkpoint; pass one from save_state (tinker://.../weights/...)"
        raise UserError(msg)


# Training -------------------------------------------------------------------------------------------------------------


def forward_backward(request: TrainingRequest, stand_in: StandIn | None = None) -> ops.ForwardBackward:
    """Return a Forward if the request is forward-only.

    `stand_in` is computed for `stable_reinforce`, for which alone provenance spans have a meaning.
    """
    if request.head.loss_fn == _CUSTOM:
        msg = f"loss_fn {_CUSTOM!r} is not offered: {CUSTOM_LOSSES_RUN_IN_CLIENTS}"
        raise UnsupportedError(msg)
    head, loss_fn, config = request.head, request.head.loss_fn, _loss_config(request.head)
    used = stand_in if loss_fn == stable_reinforce.NAME else None
    if used is not None:
        loss_fn, config = used.loss.name, {**used.config, **config}
    elif loss_fn == stable_reinforce.NAME:
        raise stable_reinforce.refuse(f"loss_fn {loss_fn!r}")
    operation = ops.Forward if head.forward_only else ops.ForwardBackward
    return operation(
        model_id=head.model_id,
        data=tuple(_datum(index, request.datum(index), loss_fn, used) for index in range(len(request.data))),
        loss_fn=loss_fn,
        loss_fn_config={key: config[key] for key in sorted(config)},
        stands_in_for="" if used is None else stable_reinforce.NAME,
    )


def _datum(index: int, datum: pb.Datum, loss_fn: str, stand_in: StandIn | None) -> ops.Datum:
    try:
        tokens = wire_tensors.read_tokens([_text_tokens(chunk) for chunk in datum.model_input])
        inputs: Mapping[str, ops.Array] = _loss_inputs(datum.loss_fn_inputs, loss_fn)
        return ops.Datum(tokens_T=tokens, loss_inputs=inputs if stand_in is None else stand_in.inputs(datum, inputs))
    except UserError as error:
        msg = f"data[{index}]: {error}"
        raise type(error)(msg) from error


def _text_tokens(chunk: pb.Chunk) -> bytes:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        msg = f"model_input: {kind or 'empty'} chunks are not offered; send encoded_text"
        raise UnsupportedError(msg)
    return chunk.encoded_text.tokens


def _loss_inputs(tensors: Mapping[str, pb.Tensor], loss_fn: str) -> dict[str, ops.Array]:
    """Cross-entropy without weights counts every target once; cells that sparse targets do not list are no targets."""
    inputs = {name: _loss_input(name, tensors[name]) for name in sorted(tensors)}
    if loss_fn == "cross_entropy" and "target_tokens" in inputs and "weights" not in inputs:
        inputs["weights"] = wire_tensors.listed(tensors["target_tokens"], inputs["target_tokens"].shape)
    return inputs


def _loss_input(name: str, tensor: pb.Tensor) -> ops.Array:
    where = f"loss_fn_inputs: {name}"
    values = wire_tensors.tensor_from_proto(where, tensor)
    return values if name == "target_tokens" else wire_tensors.as_float32(where, values)


def _loss_config(request: pb.ForwardBackwardRequest) -> Mapping[str, float]:
    """Numbers come in both maps, text only in the second."""
    config = dict(request.loss_fn_config)
    for key in sorted(request.loss_fn_config_v2):
        value = request.loss_fn_config_v2[key]
        if value.WhichOneof("value") != "number":
            msg = f"loss_fn_config: {key!r} is text, {value.text[:100]!r}; {request.loss_fn!r} takes numbers only"
            raise UnsupportedError(msg)
        if key in config and config[key] != value.number and not isnan(value.number):  # NaN is refused as such
            msg = f"loss_fn_config: {key!r} is {config[key]}, and {value.number} in loss_fn_config_v2; send one number"
            raise UserError(msg)
        config[key] = value.number
    return config


def optim_step(request: wire.OptimStepRequest) -> ops.OptimStep:
    if request.optimizer_params is not None:
        msg = f"optimizer_params: {request.optimizer_params.get('type')!r} is not offered; use adam_params"
        raise UnsupportedError(msg)
    if request.adam_params is None:
        msg = "adam_params is missing"
        raise UserError(msg)
    return ops.OptimStep(model_id=request.model_id, adam=ops.AdamParams(**request.adam_params.model_dump()))


# Weights --------------------------------------------------------------------------------------------------------------


def save_weights(request: wire.SaveWeightsRequest) -> ops.SaveState:
    return ops.SaveState(
        model_id=request.model_id,
        path=_new_path(request.model_id, "weights", request.path),
        overwrite=request.overwrite,
        ttl_seconds=checked_ttl(request.ttl_seconds),
        user_metadata=_sorted(request.user_metadata),
    )


def save_weights_for_sampler(request: wire.SaveWeightsForSamplerRequest, session_id: str) -> ops.SaveForSampler:
    """Return a persisted snapshot if a name is given, else an ephemeral one."""
    if request.kind not in _KINDS:
        msg = f"kind {request.kind!r} is not offered; use one of {', '.join(map(repr, _KINDS))}"
        raise UnsupportedError(msg)
    if request.path is not None and request.kind != "snapshot":
        msg = f"kind {request.kind!r} takes no path: what a checkpoint holds never changes; leave one of them out"
        raise UserError(msg)
    if request.path is not None:
        if request.sampling_session_seq_id is not None:
            msg = "path and sampling_session_seq_id exclude each other; send the name for a checkpoint, or the number"
            raise UserError(msg)
        return ops.SaveForSampler(
            model_id=request.model_id,
            path=_new_path(request.model_id, "sampler_weights", request.path),
            ttl_seconds=checked_ttl(request.ttl_seconds),
            user_metadata=_sorted(request.user_metadata),
        )
    if request.sampling_session_seq_id is None:
        msg = "path and sampling_session_seq_id are both missing; send a name, or the number of a sampling session"
        raise UserError(msg)
    for name, value in (("ttl_seconds", request.ttl_seconds), ("user_metadata", request.user_metadata)):
        if value:
            msg = f"{name} needs a name (path): a sampler without one ends with its session"
            raise UnsupportedError(msg)
    sampler = sampling_session_id(session_id, request.sampling_session_seq_id)
    return ops.SaveForSampler(
        model_id=request.model_id, sampling_session_id=sampler, inflight=request.kind == "inflight"
    )


def save_weights_external(request: wire.SaveWeightsExternalRequest) -> ops.ExportAdapter:
    """Raise UserError if files cannot be encrypted for these recipients."""
    recipients = tuple(request.age_encryption_recipients or ())
    if recipients:
        read_recipients(recipients)
    return ops.ExportAdapter(
        model_id=request.model_id,
        path=_new_path(request.model_id, "external_weights", request.path),
        ttl_seconds=checked_ttl(request.ttl_seconds),
        recipients=recipients,
    )


def load_weights(request: wire.LoadWeightsRequest) -> ops.LoadState:
    check_load(request)
    if request.base_model is not None:
        msg = f"base_model {request.base_model!r} is not allowed with model_id; an existing model keeps its own"
        raise UnsupportedError(msg)
    if request.user_metadata:
        msg = "user_metadata is not allowed with model_id; an existing model keeps its own"
        raise UnsupportedError(msg)
    return ops.LoadState(model_id=request.model_id or "", path=request.path, load_optimizer=request.optimizer)


def checked_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not TTL_SECONDS.holds(ttl_seconds):
        low, high = TTL_SECONDS.low, TTL_SECONDS.high
        msg = f"ttl_seconds is {ttl_seconds}; allowed: {low} (an hour) to {high} (ten years), or null"
        raise UserError(msg)
    return ttl_seconds


def _new_path(model: str, segment: str, name: str | None) -> str:
    if name is None:
        msg = "path is missing; send a name for the checkpoint"
        raise UserError(msg)
    if "/" in name:  # a slash would name another place, not another checkpoint
        msg = f"checkpoint name {name[:200]!r} is not allowed: it must not contain '/'"
        raise UserError(msg)
    return str(TinkerPath.parse(f"tinker://{model}/{segment}/{name}"))


def _sorted(metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    return {key: (metadata or {})[key] for key in sorted(metadata or {})}


# Sampling -------------------------------------------------------------------------------------------------------------


def sample(
    request: wire.SampleRequest,
    *,
    sampling_session: str,
    snapshot_id: str | None,
    max_context_tokens: int | None,
    stand_in: StandIn | None = None,
) -> ops.Sample:
    """`max_context_tokens` bounds a sample without max_tokens. It is None until the engine has reported it.

    With `stand_in`, stability information may be asked for: what stands in needs nothing recorded.
    """
    NUM_SAMPLES.check("num_samples", request.num_samples)
    if request.record_stability_info and stand_in is None:
        raise stable_reinforce.refuse("record_stability_info")
    prompt, targets = wire_tensors.tokens_from_json("prompt", request.prompt.chunks), request.target_prompt_logprobs
    return ops.Sample(
        sampling_session_id=sampling_session,
        snapshot_id=snapshot_id,
        prompt_P=prompt,
        params=_sampling_params(request, len(prompt), sampling_session, max_context_tokens),
        num_samples=request.num_samples,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None
        if targets is None
        else wire_tensors.target_tokens_from_json("target_prompt_logprobs", targets),
        target_layout=None if targets is None else wire_tensors.layout_from_json(targets),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
    )


def check_targets(request: wire.SampleRequest) -> None:
    """Raises UserError if the targets would be too large once made dense. Reads their shape alone."""
    targets = request.target_prompt_logprobs
    if targets is not None and targets.sparse_crow_indices is not None:
        wire_tensors.check_sparse_shape("target_prompt_logprobs", targets.shape or [])


def _sampling_params(
    request: wire.SampleRequest, num_prompt: int, sampling_session: str, max_context_tokens: int | None
) -> ops.SamplingParams:
    params = request.sampling_params
    max_tokens = params.max_tokens
    if max_tokens is None and max_context_tokens is None:
        msg = "sampling_params: max_tokens is missing, and the context length is not known until the model has loaded"
        raise CapacityError(msg, queue_state="paused_capacity")
    if max_tokens is None and max_context_tokens is not None:
        max_tokens = max(1, max_context_tokens - num_prompt)
    strings, tokens = _stops(params.stop)
    seed = _derived_seed(f"{sampling_session}/{request.seq_id}") if params.seed is None else params.seed
    return ops.SamplingParams(
        max_tokens=max_tokens or 0,
        seed=seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        stop_strings=strings,
        stop_tokens=tokens,
        stop_at_eos=params.stop != [],
    )


def _stops(stop: str | list[int] | list[str] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    listed = [stop] if isinstance(stop, str) else list(stop or [])
    strings = tuple(each for each in listed if isinstance(each, str))
    tokens = tuple(each for each in listed if isinstance(each, int))
    if "" in strings:
        msg = "sampling_params: stop holds an empty string, which would end every sample at once"
        raise UserError(msg)
    if any(not -(2**31) <= token < 2**31 for token in tokens):
        msg = f"sampling_params: stop holds a token id that is out of range: {max(tokens, key=abs)}"
        raise UserError(msg)
    return strings, tokens


def _derived_seed(name: str) -> int:
    """Derive a seed from ids that are never used twice, so that a retried request is the same request."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % wire.SEED_RANGE


def checksum(text: str) -> int:
    """Map a text to a non-negative 31-bit number, for answers that need an integer id."""
    return zlib.crc32(text.encode()) & 0x7FFFFFFF
