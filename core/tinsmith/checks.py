"""Compares operations with the capabilities of trainer and sampler, in one place. `ranges.py` has the ranges.

The engine checks every operation before it runs; the server checks it earlier if it knows the capabilities. That the
request is well-formed, `translate.py` has checked before.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final, assert_never

import numpy as np

from tinsmith import corrections
from tinsmith import operations as ops
from tinsmith.backend import Capabilities, ReplayedExperts, SamplerCapabilities, TrainerCapabilities
from tinsmith.errors import ServerError, UnsupportedError, UserError
from tinsmith.losses import LossSpec
from tinsmith.ranges import TTL_SECONDS, Range, sampling_ranges, training_ranges
from tinsmith.store import EngineCapabilities

_NUMBERS: Final = ("max_tokens", "seed", "temperature", "top_k", "top_p")  # of sampling parameters


def check_operation(op: ops.Operation, capabilities: EngineCapabilities, losses: Mapping[str, LossSpec]) -> None:
    """Raises UserError, naming the fault and the allowed values, if trainer or sampler cannot carry out `op`.

    Raises ServerError if the server's own addition is at fault: the experts that were recorded with samples.
    """
    match op:
        case ops.CreateModel():
            _check_lora(op.lora, capabilities.trainer)
            if capabilities.sampler is not None and (reason := why_not_sampled(op.lora, capabilities.sampler)):
                raise UnsupportedError(reason)
        case ops.ForwardBackward():
            _check_forward_backward(op, capabilities.trainer, losses)
        case ops.OptimStep():
            numbers = {f"adam_params: {name}": value for name, value in asdict(op.adam).items()}
            _check_numbers(training_ranges(capabilities.trainer), numbers)
        case ops.Sample():
            if capabilities.sampler is None:
                msg = "this base model has no sampler; configure one (`models[].sampler`)"
                raise UnsupportedError(msg)
            _check_trainable(op, capabilities.trainer)
            check_sample_operation(op, capabilities.sampler)
        case ops.SaveState() | ops.SaveForSampler() | ops.ExportAdapter():
            if op.ttl_seconds is not None:
                TTL_SECONDS.check("ttl_seconds", op.ttl_seconds)
        case ops.LoadState() | ops.UnloadModel():
            pass
        case _:
            assert_never(op)


def _check_lora(lora: ops.LoraConfig, trainer: TrainerCapabilities) -> None:
    _check_numbers(training_ranges(trainer), {"lora_config: seed": lora.seed, "lora_config: alpha": lora.alpha})
    if lora.rank == 0:
        _check_full(lora, trainer)
        return
    if trainer.max_lora_rank == 0:
        msg = "this base model's backend trains no LoRA adapters (its max_lora_rank is 0)"
        raise UnsupportedError(msg)
    _check_numbers(training_ranges(trainer), {"lora_config: rank": lora.rank})
    if not lora.targets:
        msg = "lora_config: train_attn, train_mlp and train_unembed are all false; set at least one of them"
        raise UserError(msg)
    for target in lora.targets:
        if target not in trainer.lora_targets:
            allowed = ", ".join(f"train_{each}" for each in sorted(trainer.lora_targets))
            msg = f"lora_config: train_{target} is not offered by this base model's backend, only {allowed}"
            raise UnsupportedError(msg)


def _check_full(lora: ops.LoraConfig, trainer: TrainerCapabilities) -> None:
    if not trainer.full_fine_tuning:
        greatest = trainer.max_lora_rank
        msg = (
            f"lora_config: rank 0 asks for full fine-tuning, which this base model's backend does not offer; use a "
            f"rank of 1 to {greatest}"
        )
        raise UnsupportedError(msg)
    if not (lora.train_attn and lora.train_mlp and lora.train_unembed):
        msg = (
            "lora_config: full fine-tuning (rank 0) trains everything; leave train_attn, train_mlp and train_unembed "
            "set"
        )
        raise UnsupportedError(msg)


def why_not_sampled(lora: ops.LoraConfig, sampler: SamplerCapabilities) -> str | None:
    """Return what keeps a sampler from taking snapshots of such models, with the remedies; None if it takes them."""
    greatest = sampler.max_lora_rank
    other = "or have this base model served with another sampler, or with none (`models[].sampler`)"
    if lora.rank == 0:
        if sampler.full_fine_tuning:
            return None
        return (
            f"lora_config: rank 0 trains all weights, and this base model's sampler takes LoRA adapters alone; use a "
            f"rank of 1 to {greatest}, {other}"
        )
    if lora.rank > greatest:
        return (
            f"lora_config: rank is {lora.rank}, and this base model's sampler takes LoRA adapters of ranks up to "
            f"{greatest}; use such a rank, or have the sampler's `max_lora_rank` raised"
        )
    for target in lora.targets:
        if target not in sampler.lora_targets:
            return (
                f"lora_config: train_{target} is set, and this base model's sampler takes no adapters of that part; "
                f"set it to false, {other}"
            )
    return None


# Training -------------------------------------------------------------------------------------------------------------


def _check_forward_backward(
    op: ops.ForwardBackward, trainer: TrainerCapabilities, losses: Mapping[str, LossSpec]
) -> None:
    spec = losses.get(op.loss_fn)
    if spec is None or op.loss_fn not in trainer.losses:
        offered = ", ".join(sorted(trainer.losses & losses.keys()))
        msg = f"loss_fn {op.loss_fn!r} is not offered by this base model's backend; use one of {offered}"
        raise UnsupportedError(msg)
    ranges = training_ranges(trainer)
    _check_loss_config(op, spec, ranges["loss_fn_config"])
    corrections.check(op, spec)
    if not op.data:
        msg = "data is empty; send at least one datum"
        raise UserError(msg)
    for index, datum in enumerate(op.data):
        try:
            _check_datum(datum, spec, trainer, ranges["loss_fn_inputs"], corrected=corrections.are_sent(op))
        except (UserError, ServerError) as error:
            msg = f"data[{index}]: {error}"
            raise type(error)(msg) from error


def _check_loss_config(op: ops.ForwardBackward, spec: LossSpec, allowed_numbers: Range) -> None:
    for key, value in op.loss_fn_config.items():
        if key not in {*spec.settings, *corrections.SETTINGS}:
            sent = corrections.SETTINGS if corrections.are_sent(op) else ()
            allowed = ", ".join([*spec.settings, *sent]) or "none"
            msg = f"loss_fn_config: {key!r} is not a setting of {spec.name!r}; allowed: {allowed}"
            raise UnsupportedError(msg)
        allowed_numbers.check(f"loss_fn_config: {key!r}", value)
    config = {**spec.config, **op.loss_fn_config}
    lacking = [key for key in spec.settings if key not in config]
    if lacking:
        msg = f"loss_fn_config: {lacking[0]!r} is missing; {spec.name!r} needs {', '.join(spec.required_config)}"
        raise UserError(msg)
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    if low is not None and high is not None and low > high:
        msg = f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}"
        raise UserError(msg)


def _check_datum(
    datum: ops.Datum, spec: LossSpec, trainer: TrainerCapabilities, allowed_inputs: Range, *, corrected: bool
) -> None:
    _check_sequence(datum, trainer)
    num_tokens = len(datum.tokens_T)
    inputs = {*spec.inputs, *((corrections.ROLLOUT, corrections.MARKED) if corrected else ())}
    required, what = {"target_tokens", *inputs}, repr(spec.name) + corrected * f" with {corrections.ROLLOUT!r}"
    missing, unknown = sorted(required - datum.loss_inputs.keys()), sorted(datum.loss_inputs.keys() - required)
    if missing:
        msg = f"loss_fn_inputs: {missing[0]!r} is missing; {what} needs {', '.join(sorted(required))}"
        raise UserError(msg)
    if unknown:
        msg = f"loss_fn_inputs: {unknown[0]!r} is not an input of {what}; it takes {', '.join(sorted(required))}"
        raise UnsupportedError(msg)
    if datum.routed_experts is not None:
        _check_experts(datum.routed_experts, num_tokens, trainer.replayed_experts)
    _check_targets(datum, trainer)
    if (spec.sums or corrected) and datum.targets_TK.shape[1] > 1:
        shape = list(datum.loss_inputs["target_tokens"].shape)
        msg = f"loss_fn_inputs: target_tokens has shape {shape}; {what} takes one target per token: [{num_tokens}]"
        raise UserError(msg)
    for name in sorted(inputs):
        _check_input(name, datum, allowed_inputs)


def _check_sequence(datum: ops.Datum, trainer: TrainerCapabilities) -> None:
    num_tokens = len(datum.tokens_T)
    if num_tokens == 0:
        msg = "model_input is empty; send at least one token"
        raise UserError(msg)
    if num_tokens > trainer.max_context_tokens:
        msg = f"model_input has {num_tokens} tokens; the context holds {trainer.max_context_tokens}"
        raise UserError(msg)
    _check_tokens("model_input", datum.tokens_T, trainer)


def _check_experts(experts: ops.ExpertArray, num_tokens: int, allowed: ReplayedExperts | None) -> None:
    if allowed is None:
        msg = (
            "its sampled sequence was recorded with its experts, which this base model's backend does not replay; turn "
            "`routing_replay` off, or take a backend that replays them"
        )
        raise UnsupportedError(msg)
    if len(experts) == 0:
        return
    if experts.shape[1:] != (allowed.num_layers, allowed.top_k) or len(experts) > num_tokens:
        msg = (
            f"its recorded experts have the shape {list(experts.shape)}; {num_tokens} tokens of this model need "
            f"[<= {num_tokens}, {allowed.num_layers}, {allowed.top_k}]: they were sampled with another model"
        )
        raise ServerError(msg)
    if experts.max() >= allowed.num_experts:
        msg = (
            f"its recorded experts go up to number {experts.max()}; this model has {allowed.num_experts}, from 0 on: "
            "they were sampled with another model"
        )
        raise ServerError(msg)
    ordered = np.sort(experts, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if twice.any():
        token, layer = np.argwhere(twice)[0]
        msg = (
            f"its recorded experts of token {token} in layer {layer} are {experts[token, layer].tolist()}; they must "
            "differ: the sampler has recorded what its router cannot have chosen"
        )
        raise ServerError(msg)


def _check_targets(datum: ops.Datum, trainer: TrainerCapabilities) -> None:
    targets, num_tokens = datum.loss_inputs["target_tokens"], len(datum.tokens_T)
    if targets.ndim not in {1, 2} or targets.shape[0] != num_tokens:
        msg = (
            f"loss_fn_inputs: target_tokens has shape {list(targets.shape)}, model_input {num_tokens} tokens; expected "
            f"[{num_tokens}] or [{num_tokens}, K]"
        )
        raise UserError(msg)
    num_targets = 1 if targets.ndim == 1 else targets.shape[1]
    if not 1 <= num_targets <= trainer.max_targets_per_token:
        msg = (
            f"loss_fn_inputs: target_tokens has {num_targets} targets per token; allowed: 1 to "
            f"{trainer.max_targets_per_token}"
        )
        raise UserError(msg)
    if targets.dtype != np.int64:
        msg = f"loss_fn_inputs: target_tokens is {targets.dtype}; send int64"
        raise UserError(msg)
    _check_tokens("loss_fn_inputs: target_tokens", targets.reshape(-1), trainer)


def _check_input(name: str, datum: ops.Datum, allowed: Range) -> None:
    values, expected = datum.loss_inputs[name], datum.loss_inputs["target_tokens"].shape
    if values.shape != expected:
        msg = f"loss_fn_inputs: {name} has shape {list(values.shape)}, target_tokens {list(expected)}; they must agree"
        raise UserError(msg)
    _check_values(name, values, allowed)


def _check_values(name: str, values: ops.Array, allowed: Range) -> None:
    if values.dtype != np.float32:
        msg = f"loss_fn_inputs: {name} is {values.dtype}; send float32"
        raise UserError(msg)
    bad = ~(np.abs(values.reshape(-1)) <= np.float32(allowed.high))  # of NaN too
    if bad.any():
        index = int(bad.argmax())
        msg = f"loss_fn_inputs: {name} holds {values.reshape(-1)[index]} at position {index}; allowed: {allowed}"
        raise UserError(msg)


def _check_tokens(what: str, tokens: ops.TokenArray | ops.IntArray, capabilities: Capabilities) -> None:
    bad = (tokens < 0) | (tokens >= capabilities.vocab_size)
    if bad.any():
        index = int(bad.argmax())
        msg = f"{what}: token id {int(tokens[index])} at position {index} is not in 0 to {capabilities.vocab_size - 1}"
        raise UserError(msg)


def _check_numbers(ranges: Mapping[str, Range], numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        ranges[name].check(name, value)


# Sampling -------------------------------------------------------------------------------------------------------------


def check_sample_operation(op: ops.Sample, sampler: SamplerCapabilities) -> None:
    """Raise UserError, naming the fault and the allowed values, if the sampler cannot draw `op`."""
    num_prompt = len(op.prompt_P)
    if num_prompt == 0:
        msg = "prompt is empty; send at least one token"
        raise UserError(msg)
    if not op.fits(sampler.max_context_tokens):
        msg = (
            f"Prompt length plus max_tokens exceeds the model's context window: {num_prompt} + {op.params.max_tokens} "
            f"> {sampler.max_context_tokens}"
        )
        raise UserError(msg)
    _check_tokens("prompt", op.prompt_P, sampler)
    _check_sampling_params(op.params, sampler)
    _check_numbers(sampling_ranges(sampler), {"num_samples": op.num_samples})
    _check_prompt_scores(op, sampler)


def _check_sampling_params(params: ops.SamplingParams, sampler: SamplerCapabilities) -> None:
    numbers = {f"sampling_params: {name}": getattr(params, name) for name in _NUMBERS}
    _check_numbers(sampling_ranges(sampler), numbers)
    if params.stop_strings and not sampler.stop_strings:
        msg = "sampling_params: stop strings are not offered by this base model's sampler; send stop token ids"
        raise UnsupportedError(msg)
    if params.stop_tokens:
        _check_tokens("sampling_params: stop", np.asarray(params.stop_tokens, np.int64), sampler)


def _check_prompt_scores(op: ops.Sample, sampler: SamplerCapabilities) -> None:
    wants_prompt = op.prompt_logprobs or op.topk_prompt_logprobs > 0
    if wants_prompt and not sampler.prompt_logprobs:
        msg = "prompt_logprobs are not offered by this base model's sampler"
        raise UnsupportedError(msg)
    if op.prompt_alt_tokens_k and not sampler.max_prompt_alt_tokens:
        msg = f"prompt_alt_tokens_k is {op.prompt_alt_tokens_k}; it is not offered by this base model's sampler"
        raise UnsupportedError(msg)
    _check_numbers(sampling_ranges(sampler), {**_topk(op), "prompt_alt_tokens_k": op.prompt_alt_tokens_k})
    last_n, num_prompt = op.prompt_logprobs_last_n, len(op.prompt_P)
    if last_n is not None and not op.prompt_logprobs:
        msg = "prompt_logprobs_last_n needs prompt_logprobs; set it to true"
        raise UserError(msg)
    if last_n is not None and not 1 <= last_n <= num_prompt - 1:
        msg = f"prompt_logprobs_last_n is {last_n}; with a prompt of {num_prompt} tokens use 1 to {num_prompt - 1}"
        raise UserError(msg)
    _check_target_prompt(op, sampler)


def _check_target_prompt(op: ops.Sample, sampler: SamplerCapabilities) -> None:
    targets = op.target_prompt_logprobs
    if targets is None:
        return
    if not sampler.target_prompt_logprobs:
        msg = "target_prompt_logprobs are not offered by this base model's sampler"
        raise UnsupportedError(msg)
    num_rows = len(op.prompt_P) - 1
    if targets.ndim != 2 or targets.shape[0] != num_rows or targets.shape[1] < 1:
        msg = f"target_prompt_logprobs has shape {list(targets.shape)}; expected [{num_rows}, K]"
        raise UserError(msg)
    flat = targets.reshape(-1)
    _check_tokens("target_prompt_logprobs", flat[flat != -1], sampler)


def _check_trainable(op: ops.Sample, trainer: TrainerCapabilities) -> None:
    """A distillation trains on the alternatives that it samples, so no sample has more than training takes."""
    most = trainer.max_targets_per_token
    for name, k in _topk(op).items():
        if trainer.trains and k > most:
            msg = f"{name} is {k}; allowed: 0 to {most}, the targets per token that this base model's backend trains on"
            raise UserError(msg)


def _topk(op: ops.Sample) -> Mapping[str, int]:
    return {"topk_prompt_logprobs": op.topk_prompt_logprobs, "topk_sample_logprobs": op.topk_sample_logprobs}
