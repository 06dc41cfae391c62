"""The suites must be able to fail: faults seen in real servers, put into the toy backend one at a time."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith.backend import BackendContext, HostSnapshot, ModelState, OnTokens, Snapshot
from tinsmith.builtin import toy_backend, toy_sampling, toy_training
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.builtin.toy_model import Activations, Adapter, ToyModel
from tinsmith.builtin.toy_sampling import Loaded
from tinsmith.builtin.toy_training import Scored, TrainedModel
from tinsmith.divergence import refuses_step
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import (
    AdamParams,
    Array,
    CreateModel,
    Failed,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStep,
    OptimStepOutput,
    Sample,
    SampledSequence,
    SampleOutput,
    TopLogprobs,
)
from tinsmith.result_checks import WrongResultError
from tinsmith.testing import CheckpointContract, SamplingBackendContract, TrainingBackendContract
from tinsmith.testing.model_driver import ModelDriver
from tinsmith.testing.training_isolation import Company

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]

_score = toy_training.score
_sample = toy_sampling.sample
_optim_step = TrainedModel.optim_step
_forward_backward = ToyBackend.forward_backward
_accumulate = TrainedModel.accumulate


# Training -------------------------------------------------------------------------------------------------------------


def change_scores(patch: Patch, change: Callable[[Scored, int], Scored]) -> None:
    def score(model: Any, adapter: Any, datum: Any, *rest: Any, **options: Any) -> Scored:
        return change(_score(model, adapter, datum, *rest, **options), len(datum.tokens_T))

    patch.setattr(toy_training, "score", score)


def change_gradients(patch: Patch, change: Callable[[str, Array], Array]) -> None:
    change_scores(patch, lambda s, _: replace(s, gradients={k: change(k, g) for k, g in s.gradients.items()}))


def loss_is_a_mean(patch: Patch) -> None:
    change_scores(patch, lambda s, n: replace(s, loss=s.loss / n))


def gradient_is_a_mean(patch: Patch) -> None:
    change_scores(patch, lambda s, n: replace(s, gradients={k: g / n for k, g in s.gradients.items()}))


def a_is_not_trained(patch: Patch) -> None:
    change_gradients(patch, lambda name, g: g * (".lora_B." in name))


def gradient_is_off_by_two_percent(patch: Patch) -> None:
    change_gradients(patch, lambda _, g: g * 1.02)


def rl_losses_run_as_cross_entropy(patch: Patch) -> None:
    def score(model: Any, adapter: Any, datum: Any, spec: Any, config: Any, *, backward: bool) -> Scored:
        if "weights" not in datum.loss_inputs:
            inputs = {**datum.loss_inputs, "weights": datum.loss_inputs["advantages"]}
            datum, spec = replace(datum, loss_inputs=inputs), BUILTIN_LOSSES[0]
        return _score(model, adapter, datum, spec, config, backward=backward)

    patch.setattr(toy_training, "score", score)


def loss_config_is_ignored(patch: Patch) -> None:
    def score(model: Any, adapter: Any, datum: Any, spec: Any, config: Any, *, backward: bool) -> Scored:
        return _score(model, adapter, datum, spec, {}, backward=backward)

    patch.setattr(toy_training, "score", score)


def logprobs_are_shifted_again(patch: Patch) -> None:
    change_scores(patch, lambda s, _: replace(s, outputs={"logprobs": np.roll(s.outputs["logprobs"], 1)}))


def forward_adds_gradients(patch: Patch) -> None:
    patch.setattr(ToyBackend, "forward", ToyBackend.forward_backward)


def gradients_are_replaced(patch: Patch) -> None:
    def accumulate(self: TrainedModel, gradients: Any) -> None:
        self.gradients = {}
        _accumulate(self, gradients)

    patch.setattr(TrainedModel, "accumulate", accumulate)


def gradients_stay_after_a_step(patch: Patch) -> None:
    def optim_step(self: TrainedModel, adam: AdamParams) -> float:
        gradients = self.gradients
        norm = _optim_step(self, adam)
        self.gradients = gradients
        return norm

    patch.setattr(TrainedModel, "optim_step", optim_step)


def steps_are_never_refused(patch: Patch) -> None:
    patch.setattr(toy_training, "refuses_step", lambda *_: False)


def refused_steps_answer_success(patch: Patch) -> None:
    patch.setattr(toy_backend, "step_result", lambda norm, _: OptimStepOutput(metrics={"grad_norm": norm}))


def passes_hide_what_is_not_finite(patch: Patch) -> None:
    patch.setattr(toy_backend, "are_finite", lambda _: True)


def what_is_not_finite_is_said_of_all(patch: Patch) -> None:
    def forward_backward(self: ToyBackend, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        results = _forward_backward(self, ops)
        said = {**results[-1].metrics} if isinstance(results[-1], ForwardBackwardOutput) else {}
        return [replace(each, metrics={**said, **each.metrics}) for each in results]

    patch.setattr(ToyBackend, "forward_backward", forward_backward)


def refused_steps_count(patch: Patch) -> None:
    def optim_step(self: TrainedModel, adam: AdamParams) -> float:
        norm = _optim_step(self, adam)
        self.step += refuses_step(norm, adam)
        return norm

    patch.setattr(TrainedModel, "optim_step", optim_step)


def a_refused_step_refuses_its_call(patch: Patch) -> None:
    step = ToyBackend.optim_step

    def optim_step(self: ToyBackend, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        results = step(self, ops)
        failed = [result for result in results if isinstance(result, Failed)]
        return failed * len(ops) if failed else results

    patch.setattr(ToyBackend, "optim_step", optim_step)


def drop_every_gradient(patch: Patch) -> None:
    def drop_gradient(self: ToyBackend, model_id: str) -> None:
        for model in self.device.models.values():
            model.gradients = {}

    patch.setattr(ToyBackend, "drop_gradient", drop_gradient)


def ignore_in_steps(**fields: float) -> Fault:
    def fault(patch: Patch) -> None:
        patch.setattr(TrainedModel, "optim_step", lambda self, adam: _optim_step(self, replace(adam, **fields)))

    return fault


def change_outputs(change: Callable[[Array], Any]) -> Fault:
    """Change the logprobs, as the engine would not record them."""
    return lambda patch: change_scores(
        patch, lambda s, _: replace(s, outputs={name: change(array) for name, array in s.outputs.items()})
    )


def steps_have_no_metrics(patch: Patch) -> None:
    optim_step = ToyBackend.optim_step

    def bare(self: ToyBackend, ops: Sequence[OptimStep]) -> list[Any]:
        return [replace(result, metrics=None) for result in optim_step(self, ops)]

    patch.setattr(ToyBackend, "optim_step", bare)


def decay_reaches_everybody(patch: Patch) -> None:
    def optim_step(self: ToyBackend, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        for op in ops:
            for model in self.device.models.values():
                shrunk = np.float32(1 - op.adam.learning_rate * op.adam.weight_decay)
                model.weights = {name: weight * shrunk for name, weight in model.weights.items()}
        for op in ops:
            self.device.models[op.model_id].optim_step(replace(op.adam, weight_decay=0.0))
        return [OptimStepOutput() for _ in ops]

    patch.setattr(ToyBackend, "optim_step", optim_step)


def nan_is_contagious(patch: Patch) -> None:
    def forward_backward(self: ToyBackend, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        results = [self.score(op, backward=True) for op in ops]
        if any(np.isnan(g).any() for op in ops for g in self.device.models[op.model_id].gradients.values()):
            for op in ops:
                model = self.device.models[op.model_id]
                model.gradients = {name: g * np.float32("nan") for name, g in model.gradients.items()}
        return results

    patch.setattr(ToyBackend, "forward_backward", forward_backward)


def rounding_depends_on_company(patch: Patch) -> None:
    def forward_backward(self: ToyBackend, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        results = [self.score(op, backward=True) for op in ops]
        for op in ops if len(ops) > 1 else ():
            model = self.device.models[op.model_id]
            model.gradients = {name: g * np.float32(1 + 1e-6) for name, g in model.gradients.items()}
        return results

    patch.setattr(ToyBackend, "forward_backward", forward_backward)


def freed_places_keep_gradients(patch: Patch) -> None:
    attic: list[TrainedModel] = []
    create = ToyBackend.create_model

    def create_model(self: ToyBackend, op: CreateModel) -> None:
        create(self, op)
        if attic:
            self.device.models[op.model_id].gradients = attic.pop().gradients

    patch.setattr(ToyBackend, "create_model", create_model)
    patch.setattr(ToyBackend, "unload_model", lambda self, model_id: attic.append(self.device.models.pop(model_id)))


def results_come_in_another_order(patch: Patch) -> None:
    def forward_backward(self: ToyBackend, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        by_model = sorted(ops, key=lambda op: op.model_id)
        return [self.score(op, backward=True) for op in by_model]

    patch.setattr(ToyBackend, "forward_backward", forward_backward)


def any_rank_is_accepted(patch: Patch) -> None:
    def create_model(self: ToyBackend, op: CreateModel) -> None:
        self.device.models[op.model_id] = TrainedModel(lora=op.lora, weights=self.device.model.init_lora(op.lora))

    patch.setattr(ToyBackend, "create_model", create_model)


def flags_are_ignored(patch: Patch) -> None:
    def create_model(self: ToyBackend, op: CreateModel) -> None:
        everything = LoraConfig(rank=op.lora.rank, seed=op.lora.seed)
        self.device.models[op.model_id] = TrainedModel(lora=op.lora, weights=self.device.model.init_lora(everything))

    patch.setattr(ToyBackend, "create_model", create_model)


def seed_is_ignored(patch: Patch) -> None:
    def create_model(self: ToyBackend, op: CreateModel) -> None:
        lora = replace(op.lora, seed=0)
        self.device.models[op.model_id] = TrainedModel(lora=op.lora, weights=self.device.model.init_lora(lora))

    patch.setattr(ToyBackend, "create_model", create_model)


def alpha_is_twice_the_rank(patch: Patch) -> None:
    patch.setattr(TrainedModel, "adapter", property(lambda self: Adapter(weights=self.weights, scale=2.0)))


def capture_without(part: str) -> Fault:
    def fault(patch: Patch) -> None:
        capture = ToyBackend.capture_state
        empty: Any = 0 if part == "step" else {}
        patch.setattr(ToyBackend, "capture_state", lambda self, m: replace(capture(self, m), **{part: empty}))

    return fault


def restore_without(part: str) -> Fault:
    def fault(patch: Patch) -> None:
        restore = ToyBackend.restore_state
        empty: Any = 0 if part == "step" else {}

        def restore_state(self: ToyBackend, model_id: str, state: ModelState) -> None:
            restore(self, model_id, replace(state, **{part: empty}))

        patch.setattr(ToyBackend, "restore_state", restore_state)

    return fault


class LiveSnapshot(HostSnapshot):
    """What must not be: a window onto the model instead of a picture of it."""

    def __init__(self, snapshot_id: str, model: TrainedModel) -> None:
        super().__init__(snapshot_id, model.lora, {})
        self._model = model

    def adapter_weights(self) -> dict[str, Any]:
        return self._model.weights


def snapshots_are_live(patch: Patch) -> None:
    def publish(self: ToyBackend, model_id: str, snapshot_id: str) -> Snapshot:
        return LiveSnapshot(snapshot_id, self.device.models[model_id])

    patch.setattr(ToyBackend, "publish", publish)


def gradients_are_lost_in_sleep(patch: Patch) -> None:
    sleep = ToyBackend.sleep_trainer

    def forgetful(self: ToyBackend) -> None:
        if self._awake is not None:
            for model in self._awake.models.values():
                model.gradients = {}
        sleep(self)

    patch.setattr(ToyBackend, "sleep_trainer", forgetful)


def it_works_in_its_sleep(patch: Patch) -> None:
    patch.setattr(ToyBackend, "sleep_trainer", lambda _: None)


def a_second_sleep_forgets(patch: Patch) -> None:
    sleep = ToyBackend.sleep_trainer

    def forgetful(self: ToyBackend) -> None:
        if self._awake is None:
            self.wake_trainer()
            self.device.models.clear()
        sleep(self)

    patch.setattr(ToyBackend, "sleep_trainer", forgetful)


def steps_raise_if(condition: Callable[[AdamParams], bool]) -> Fault:
    """As a kernel does whose scalars are float32."""

    def fault(patch: Patch) -> None:
        def optim_step(self: TrainedModel, adam: AdamParams) -> float:
            if condition(adam):
                msg = "value cannot be converted to type float without overflow"
                raise RuntimeError(msg)
            return _optim_step(self, adam)

        patch.setattr(TrainedModel, "optim_step", optim_step)

    return fault


def passes_raise_if(condition: Callable[[ForwardBackward], bool]) -> Fault:
    def fault(patch: Patch) -> None:
        score = ToyBackend.score

        def raising(self: ToyBackend, op: Forward, *, backward: bool) -> ForwardBackwardOutput | Failed:
            if condition(op):
                msg = "this pass ends the engine"
                raise OverflowError(msg)
            return score(self, op, backward=backward)

        patch.setattr(ToyBackend, "score", raising)

    return fault


def large_inputs(op: ForwardBackward) -> bool:
    return any(np.abs(value).max() > 1e38 for datum in op.data for value in datum.loss_inputs.values())


def large_settings(op: ForwardBackward) -> bool:
    return any(abs(value) > 1e38 for value in op.loss_fn_config.values())


def last_token(op: ForwardBackward) -> bool:
    return any(datum.tokens_T.max() == 63 for datum in op.data if len(set(datum.tokens_T.tolist())) == 1)


def seeds_of_32_bits(patch: Patch) -> None:
    create = ToyBackend.create_model

    def create_model(self: ToyBackend, op: CreateModel) -> None:
        np.random.RandomState(op.lora.seed)
        create(self, op)

    patch.setattr(ToyBackend, "create_model", create_model)


def ruined_models_cannot_be_read(patch: Patch) -> None:
    capture = ToyBackend.capture_state

    def capture_state(self: ToyBackend, model_id: str) -> ModelState:
        state = capture(self, model_id)
        if not all(np.isfinite(weight).all() for weight in state.weights.values()):
            msg = "these weights cannot be written"
            raise ValueError(msg)
        return state

    patch.setattr(ToyBackend, "capture_state", capture_state)


# Sampling -------------------------------------------------------------------------------------------------------------


def samples_raise_if(condition: Callable[[Sample], bool]) -> Fault:
    def fault(patch: Patch) -> None:
        def refuse(op: Sample) -> Sample:
            if condition(op):
                msg = "this sample ends the engine"
                raise OverflowError(msg)
            return op

        change_requests(patch, refuse)

    return fault


def streams_skip_the_first_token(patch: Patch) -> None:
    async def sample(
        model: Any, adapter: Any, op: Sample, vocab_size: int, tell: OnTokens | None, *rest: Any
    ) -> SampleOutput:
        def shifted(sequence: int, first: int, tokens: Sequence[int]) -> None:
            if tell is not None:
                tell(sequence, first + 1, tokens)

        return await _sample(model, adapter, op, vocab_size, shifted, *rest)

    patch.setattr(toy_sampling, "sample", sample)


def streams_draw_otherwise(patch: Patch) -> None:
    async def sample(
        model: Any, adapter: Any, op: Sample, vocab_size: int, tell: OnTokens | None, *rest: Any
    ) -> SampleOutput:
        op = op if tell is None else replace(op, params=replace(op.params, seed=op.params.seed + 1))
        return await _sample(model, adapter, op, vocab_size, tell, *rest)

    patch.setattr(toy_sampling, "sample", sample)


def is_ruined(adapter: Adapter) -> bool:
    return not all(np.abs(weight).max() < 1e20 for weight in adapter.weights.values())  # of NaN, too


def of_ruined_adapters(patch: Patch, change: Callable[[SampleOutput], SampleOutput]) -> None:
    async def sample(model: Any, adapter: Adapter, op: Sample, vocab_size: int, *told: Any) -> SampleOutput:
        output = await _sample(model, adapter, op, vocab_size, *told)
        return change(output) if is_ruined(adapter) else output

    patch.setattr(toy_sampling, "sample", sample)


def ruined_adapters_end_the_sampler(patch: Patch) -> None:
    def end(output: SampleOutput) -> SampleOutput:
        del output
        msg = "probability tensor contains either `inf`, `nan` or element < 0"
        raise RuntimeError(msg)

    of_ruined_adapters(patch, end)


def ruined_adapters_draw_no_token(patch: Patch) -> None:
    def outside(s: SampledSequence) -> SampledSequence:
        return replace(s, tokens=np.full_like(s.tokens, -1))

    of_ruined_adapters(patch, lambda out: replace(out, sequences=tuple(map(outside, out.sequences))))


def a_ruined_adapter_ruins_its_batch(patch: Patch) -> None:
    running: list[list[bool]] = []  # whether each sample has been ruined

    async def sample(model: Any, adapter: Adapter, op: Sample, vocab_size: int, *told: Any) -> SampleOutput:
        running.append(mine := [False])
        if is_ruined(adapter):
            for each in running:
                each[0] = True
        output = await _sample(model, adapter, op, vocab_size, *told)
        shift = np.float32("nan" if mine[0] else 0)
        return replace(output, sequences=tuple(replace(s, logprobs=s.logprobs + shift) for s in output.sequences))

    patch.setattr(toy_sampling, "sample", sample)


def prompts_are_cached_for_everybody(patch: Patch) -> None:
    known: list[list[int]] = []

    def look_up(out: SampleOutput, op: Sample) -> SampleOutput:
        prompt = op.prompt_P.tolist()
        common = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, each, strict=False)))
            for each in known
        ]
        known.append(prompt)
        return replace(out, prompt_cache_hit_tokens=max(common, default=0))

    change_answers(patch, look_up)


def change_answers(patch: Patch, change: Callable[[SampleOutput, Sample], SampleOutput]) -> None:
    async def sample(model: Any, adapter: Any, op: Sample, vocab_size: int, *told: Any) -> SampleOutput:
        return change(await _sample(model, adapter, op, vocab_size, *told), op)

    patch.setattr(toy_sampling, "sample", sample)


def change_requests(patch: Patch, change: Callable[[Sample], Sample]) -> None:
    async def sample(model: Any, adapter: Any, op: Sample, vocab_size: int, *told: Any) -> SampleOutput:
        return await _sample(model, adapter, change(op), vocab_size, *told)

    patch.setattr(toy_sampling, "sample", sample)


def ignore_in_samples(**fields: Any) -> Fault:
    return lambda patch: change_requests(patch, lambda op: replace(op, params=replace(op.params, **fields)))


def change_sequences(patch: Patch, change: Callable[[SampledSequence, Sample], SampledSequence]) -> None:
    change_answers(patch, lambda out, op: replace(out, sequences=tuple(change(s, op) for s in out.sequences)))


def change_tokens(change: Callable[[Array], Array]) -> Fault:
    return lambda patch: change_sequences(patch, lambda s, _: replace(s, tokens=change(s.tokens)))


def a_sequence_is_missing(patch: Patch) -> None:
    change_answers(patch, lambda out, _: replace(out, sequences=out.sequences[1:]))


def alternatives_are_missing(patch: Patch) -> None:
    change_answers(patch, lambda out, _: replace(out, top_prompt_logprobs=None))


def stop_token_is_trimmed(patch: Patch) -> None:
    def trim(s: SampledSequence, _: Sample) -> SampledSequence:
        cut = len(s.tokens) - (s.stop_reason == "stop" and len(s.tokens) > 1)
        return replace(s, tokens=s.tokens[:cut], logprobs=s.logprobs[:cut])

    change_sequences(patch, trim)


def stop_reason_is_length_at_the_limit(patch: Patch) -> None:
    def mistake(s: SampledSequence, op: Sample) -> SampledSequence:
        return replace(s, stop_reason="length") if len(s.tokens) == op.params.max_tokens else s

    change_sequences(patch, mistake)


def logprobs_are_at_temperature_one(patch: Patch) -> None:
    def unscaled(s: SampledSequence, op: Sample) -> SampledSequence:
        return replace(s, logprobs=s.logprobs * np.float32(op.params.temperature or 1.0))

    change_sequences(patch, unscaled)


def samples_of_a_request_are_equal(patch: Patch) -> None:
    change_answers(patch, lambda out, op: replace(out, sequences=out.sequences[:1] * op.num_samples))


def prompt_logprobs_are_one_short(patch: Patch) -> None:
    def shorten(out: SampleOutput, _: Sample) -> SampleOutput:
        return out if out.prompt_logprobs is None else replace(out, prompt_logprobs=out.prompt_logprobs[1:])

    change_answers(patch, shorten)


def first_prompt_logprob_is_zero(patch: Patch) -> None:
    def fill(out: SampleOutput, _: Sample) -> SampleOutput:
        return out if out.prompt_logprobs is None else replace(out, prompt_logprobs=np.nan_to_num(out.prompt_logprobs))

    change_answers(patch, fill)


def last_n_is_ignored(patch: Patch) -> None:
    change_requests(patch, lambda op: replace(op, prompt_logprobs_last_n=None))


def worst_come_first(patch: Patch) -> None:
    def turn(top: TopLogprobs | None) -> TopLogprobs | None:
        return top and TopLogprobs(token_ids=top.token_ids[:, ::-1], logprobs=top.logprobs[:, ::-1])

    change_answers(patch, lambda out, _: replace(out, top_prompt_logprobs=turn(out.top_prompt_logprobs)))


def skipped_targets_are_scored(patch: Patch) -> None:
    def penalise(out: SampleOutput, op: Sample) -> SampleOutput:
        if out.target_prompt_logprobs is None:
            return out
        scored = np.where(op.target_prompt_logprobs == -1, np.float32(-1), out.target_prompt_logprobs)
        return replace(out, target_prompt_logprobs=scored)

    change_answers(patch, penalise)


def draws_depend_on_earlier_requests(patch: Patch) -> None:
    rng = np.random.default_rng(0)
    change_requests(patch, lambda op: replace(op, params=replace(op.params, seed=int(rng.integers(2**40)))))


def company_shifts_logprobs(patch: Patch) -> None:
    running = 0

    async def sample(model: Any, adapter: Any, op: Sample, vocab_size: int, *told: Any) -> SampleOutput:
        nonlocal running
        running += 1
        try:
            output = await _sample(model, adapter, op, vocab_size, *told)
            shift = 1e-4 * (running - 1)
        finally:
            running -= 1
        return replace(output, sequences=tuple(replace(s, logprobs=s.logprobs - shift) for s in output.sequences))

    patch.setattr(toy_sampling, "sample", sample)


def cancelling_is_swallowed(patch: Patch) -> None:
    async def sample(model: Any, adapter: Any, op: Sample, vocab_size: int, *told: Any) -> SampleOutput:
        try:
            return await _sample(model, adapter, op, vocab_size, *told)
        except BaseException:  # noqa: BLE001 - the fault
            return await _sample(model, adapter, op, vocab_size, *told)

    patch.setattr(toy_sampling, "sample", sample)


def diverged_weights_are_answered(patch: Patch) -> None:
    patch.setattr(toy_backend, "unless_diverged", lambda _, output: output)


def nan_stays_where_it_was(patch: Patch) -> None:
    stays = False

    async def sample(model: Any, adapter: Any, op: Sample, vocab_size: int, *told: Any) -> SampleOutput:
        nonlocal stays
        output = await _sample(model, adapter, op, vocab_size, *told)
        left, stays = stays, stays or not all(np.isfinite(s.logprobs).all() for s in output.sequences)
        scale = np.float32("nan" if left else 1)
        return replace(output, sequences=tuple(replace(s, logprobs=s.logprobs * scale) for s in output.sequences))

    patch.setattr(toy_sampling, "sample", sample)


def snapshots_are_ignored(patch: Patch) -> None:
    async def sample(model: Any, adapter: Any, op: Sample, vocab_size: int, *told: Any) -> SampleOutput:
        return await _sample(model, Adapter(weights={}, scale=1.0), op, vocab_size, *told)

    patch.setattr(toy_sampling, "sample", sample)


def samples_use_live_weights(patch: Patch) -> None:
    async def sample(self: ToyBackend, op: Sample) -> SampleOutput | Failed:
        (model,) = self.device.models.values()
        return await toy_sampling.sample(self.device.model, model.adapter, op, self.sampler_capabilities.vocab_size)

    patch.setattr(ToyBackend, "sample", sample)


def unknown_snapshots_are_the_base_model(patch: Patch) -> None:
    async def sample(self: ToyBackend, op: Sample) -> SampleOutput | Failed:
        adapter = self.device.snapshots.get(op.snapshot_id, self.device.snapshots[None])
        return await toy_sampling.sample(self.device.model, adapter, op, self.sampler_capabilities.vocab_size)

    patch.setattr(ToyBackend, "sample", sample)


async def stay(self: ToyBackend, snapshot_id: str, newer_id: str) -> None:
    self.device.newer[snapshot_id] = Loaded(newer_id, self.device.snapshots[snapshot_id])


async def move_everybody(self: ToyBackend, snapshot_id: str, newer_id: str) -> None:
    del snapshot_id
    newer = Loaded(newer_id, self.device.snapshots[newer_id])
    self.device.newer.update(dict.fromkeys(self.device.snapshots, newer))


def moves(move: Callable[..., Any]) -> Fault:
    return lambda patch: patch.setattr(ToyBackend, "move_samples", move)


def moved_sequences_forget(patch: Patch) -> None:
    """As if keys and values were thrown away with the weights that made them."""
    forward = ToyModel.forward
    began_with: list[Adapter] = []

    def forgetful(self: ToyModel, tokens_T: Any, adapter: Adapter, memory_H: Any = None) -> Activations:
        if memory_H is None:
            began_with[:] = [adapter]
        elif adapter is not began_with[0]:
            memory_H = np.zeros_like(memory_H)
        return forward(self, tokens_T, adapter, memory_H)

    patch.setattr(ToyModel, "forward", forgetful)


def moves_are_not_told(patch: Patch) -> None:
    def hide(out: SampleOutput, op: Sample) -> SampleOutput:
        del op
        return replace(out, sequences=tuple(replace(each, weights=()) for each in out.sequences))

    change_answers(patch, hide)


def drawn_tokens_are_cached(patch: Patch) -> None:
    known: list[list[int]] = []

    def look_up(out: SampleOutput, op: Sample) -> SampleOutput:
        prompt = op.prompt_P.tolist()
        hits = max((len(each) for each in known if prompt[: len(each)] == each), default=0)
        known.append([*prompt, *out.sequences[0].tokens[:-2].tolist()])
        return replace(out, prompt_cache_hit_tokens=hits)

    change_answers(patch, look_up)


def more_is_sampled_than_trained_on(patch: Patch) -> None:
    capabilities = ToyBackend.trainer_capabilities.fget  # type: ignore[attr-defined]  # a property
    patch.setattr(
        ToyBackend, "trainer_capabilities", property(lambda self: replace(capabilities(self), max_targets_per_token=63))
    )


def beside_close_isolation(fault: Fault) -> Fault:
    """The fault, in a backend that promises no more than to be within 1e-4."""

    def patched(patch: Patch) -> None:
        for name in ("trainer_capabilities", "sampler_capabilities"):
            claimed = getattr(ToyBackend, name).fget
            close = property(lambda self, of=claimed: replace(of(self), isolation="close", isolation_error=1e-4))
            patch.setattr(ToyBackend, name, close)
        fault(patch)

    patched.__name__ = f"{fault.__name__}_beside_close_isolation"
    return patched


def abuse_of(what: str, group: str) -> tuple[str, dict[str, Any]]:
    return f"test_abuse_in_{what}_hurts_nobody", {"group": group}


LOSSES: dict[str, Any] = {"loss_fn": "ppo", "defaults": False}
SAYS_SO = "test_a_pass_whose_gradient_is_not_finite_says_so"
NOT_FINITE = "test_a_step_that_is_not_finite_fails_and_changes_nothing"
FAULTS: list[tuple[Fault, str, dict[str, Any]]] = [
    (loss_is_a_mean, "test_loss_is_the_sum_that_the_oracle_gives", LOSSES),
    (loss_config_is_ignored, "test_loss_is_the_sum_that_the_oracle_gives", LOSSES),
    (rl_losses_run_as_cross_entropy, "test_loss_is_the_sum_that_the_oracle_gives", LOSSES),
    (rl_losses_run_as_cross_entropy, "test_gradient_of_every_loss", {"loss_fn": "cispo"}),
    (gradient_is_a_mean, "test_gradient_is_that_of_the_loss", {}),
    (gradient_is_off_by_two_percent, "test_gradient_is_that_of_the_loss", {}),
    (a_is_not_trained, "test_gradient_is_that_of_the_loss", {}),
    (logprobs_are_shifted_again, "test_positions_see_the_past_only", {}),
    (change_outputs(lambda a: a.astype(np.float64)), "test_gradients_add_up", {}),
    (change_outputs(lambda a: a.astype(object)), "test_gradients_add_up", {}),
    (change_outputs(lambda a: a[1:]), "test_gradients_add_up", {}),
    (change_outputs(lambda a: a.tolist()), "test_forward_leaves_gradients_alone", {}),
    (steps_have_no_metrics, "test_step_applies_and_clears", {}),
    (forward_adds_gradients, "test_forward_leaves_gradients_alone", {}),
    (gradients_are_replaced, "test_gradients_add_up", {}),
    (gradients_stay_after_a_step, "test_step_applies_and_clears", {}),
    (steps_are_never_refused, NOT_FINITE, {"ruin": "a NaN in the last tensor"}),
    (steps_are_never_refused, NOT_FINITE, {"ruin": "squares that are infinite"}),
    (steps_are_never_refused, "test_a_refused_first_step_leaves_no_moments", {}),
    (refused_steps_answer_success, NOT_FINITE, {"ruin": "an infinity"}),
    (refused_steps_count, NOT_FINITE, {"ruin": "an infinity that is clipped"}),
    (gradients_stay_after_a_step, NOT_FINITE, {"ruin": "a NaN in the first tensor"}),
    (a_refused_step_refuses_its_call, "test_a_refused_step_makes_no_difference_to_others", {}),
    (passes_hide_what_is_not_finite, SAYS_SO, {"loss_fn": "cross_entropy"}),
    (what_is_not_finite_is_said_of_all, SAYS_SO, {"loss_fn": "importance_sampling"}),
    (drop_every_gradient, "test_a_gradient_can_be_dropped", {}),
    (ignore_in_steps(grad_clip_norm=0.0), "test_step_is_adamw", {"kind": "clipped"}),
    (ignore_in_steps(weight_decay=0.0), "test_step_is_adamw", {"kind": "weight decay"}),
    (ignore_in_steps(beta1=0.9), "test_step_is_adamw", {"kind": "other betas"}),
    (ignore_in_steps(beta2=0.95), "test_step_is_adamw", {"kind": "other betas"}),
    (ignore_in_steps(eps=1e-8), "test_step_is_adamw", {"kind": "large eps"}),
    (ignore_in_steps(learning_rate=1e-4), "test_step_is_adamw", {"kind": "plain"}),
    (
        decay_reaches_everybody,
        "test_company_makes_no_difference",
        {"company": Company(neighbours=2, adam=AdamParams(weight_decay=1.0))},
    ),
    (
        beside_close_isolation(decay_reaches_everybody),
        "test_company_makes_no_difference",
        {"company": Company(neighbours=2, adam=AdamParams(learning_rate=0.1, weight_decay=1.0))},
    ),
    (decay_reaches_everybody, *abuse_of("training", "steps")),
    (steps_raise_if(lambda adam: adam.learning_rate > 1e17), *abuse_of("training", "steps")),
    (steps_raise_if(lambda adam: 0 < adam.eps < 1e-30), *abuse_of("training", "steps")),
    (steps_raise_if(lambda adam: adam.weight_decay > 1e15), *abuse_of("training", "random")),
    (passes_raise_if(large_inputs), *abuse_of("training", "loss inputs")),
    (passes_raise_if(large_settings), *abuse_of("training", "loss settings")),
    (passes_raise_if(last_token), *abuse_of("training", "tokens")),
    (seeds_of_32_bits, *abuse_of("training", "adapters")),
    (ruined_models_cannot_be_read, *abuse_of("training", "ruined weights")),
    (nan_is_contagious, *abuse_of("training", "ruined weights")),
    (samples_raise_if(lambda op: op.params.top_k > 2**15), *abuse_of("sampling", "parameters")),
    (samples_raise_if(lambda op: 0 < op.params.temperature < 1e-5), *abuse_of("sampling", "parameters")),
    (samples_raise_if(lambda op: op.params.seed > 2**53), *abuse_of("sampling", "random")),
    (samples_raise_if(lambda op: op.num_samples > 1000), *abuse_of("sampling", "questions")),
    (samples_raise_if(lambda op: 63 in op.params.stop_tokens), *abuse_of("sampling", "tokens")),
    (ruined_adapters_end_the_sampler, *abuse_of("sampling", "adapters")),
    (ruined_adapters_draw_no_token, *abuse_of("sampling", "adapters")),
    (a_ruined_adapter_ruins_its_batch, *abuse_of("sampling", "adapters")),
    (prompts_are_cached_for_everybody, "test_what_others_asked_does_not_show", {}),
    (nan_is_contagious, "test_company_makes_no_difference", {"company": Company(neighbours=1, poisoned=True)}),
    (rounding_depends_on_company, "test_company_makes_no_difference", {"company": Company(neighbours=1)}),
    (freed_places_keep_gradients, "test_freed_place_keeps_nothing", {}),
    (results_come_in_another_order, "test_merged_operations_equal_separate_ones", {}),
    (any_rank_is_accepted, "test_refused_rank_leaves_others_alone", {}),
    (flags_are_ignored, "test_flags_choose_the_modules", {"target": "mlp"}),
    (seed_is_ignored, "test_seed_decides_the_weights", {}),
    (alpha_is_twice_the_rank, "test_scale_is_alpha_over_rank", {}),
    *((capture_without(part), "test_capture_holds_everything", {}) for part in ("gradients", "adam_m", "step")),
    *(
        (restore_without(part), "test_restored_model_goes_on_bit_for_bit", {})
        for part in ("gradients", "adam_m", "adam_v", "step")
    ),
    (restore_without("gradients"), "test_training_goes_on_from_the_file", {}),
    (snapshots_are_live, "test_published_snapshot_never_changes", {}),
    (gradients_are_lost_in_sleep, "test_sleep_changes_no_bit", {}),
    (it_works_in_its_sleep, "test_nothing_else_can_be_asked_of_a_sleeper", {}),
    (a_second_sleep_forgets, "test_sleep_and_wake_are_idempotent", {}),
    (samples_use_live_weights, "test_later_training_does_not_reach_a_snapshot", {}),
    (change_tokens(lambda a: a + 10_000), "test_seed_decides", {}),
    (change_tokens(lambda a: a.astype(np.int64)), "test_seed_decides", {}),
    (change_tokens(lambda a: a[:0]), "test_greedy_takes_the_best", {}),
    (a_sequence_is_missing, "test_seed_decides", {}),
    (alternatives_are_missing, "test_top_prompt_logprobs", {}),
    (stop_token_is_trimmed, "test_stop_token_ends_and_stays", {}),
    (stop_token_is_trimmed, "test_stop_string_ends_and_stays", {}),
    (ignore_in_samples(stop_strings=()), "test_stop_string_ends_and_stays", {}),
    (ignore_in_samples(stop_tokens=()), "test_stop_token_ends_and_stays", {}),
    (ignore_in_samples(stop_at_eos=True), "test_end_of_sequence", {}),
    (ignore_in_samples(stop_at_eos=False), "test_end_of_sequence", {}),
    (stop_reason_is_length_at_the_limit, "test_stop_at_the_last_token_is_a_stop", {}),
    (ignore_in_samples(temperature=1.0), "test_greedy_takes_the_best", {}),
    (ignore_in_samples(top_k=-1), "test_top_k_and_top_p_cut", {}),
    (ignore_in_samples(top_p=1.0), "test_top_k_and_top_p_cut", {}),
    (ignore_in_samples(temperature=2.0), "test_frequencies_are_the_probabilities", {}),
    (ignore_in_samples(seed=1), "test_seed_decides", {}),
    (samples_of_a_request_are_equal, "test_seed_decides", {}),
    (logprobs_are_at_temperature_one, "test_logprobs_are_of_the_scaled_distribution", {"temperature": 0.5}),
    (prompt_logprobs_are_one_short, "test_prompt_logprobs", {"length": 20}),
    (first_prompt_logprob_is_zero, "test_prompt_logprobs", {"length": 20}),
    (last_n_is_ignored, "test_last_n_leaves_the_rest_unscored", {}),
    (worst_come_first, "test_top_prompt_logprobs", {}),
    (skipped_targets_are_scored, "test_target_prompt_logprobs", {}),
    (more_is_sampled_than_trained_on, "test_what_is_sampled_can_be_trained_on", {}),
    (snapshots_are_ignored, "test_sampler_and_trainer_agree", {}),
    (snapshots_are_ignored, "test_snapshots_differ_from_the_base_and_each_other", {}),
    (unknown_snapshots_are_the_base_model, "test_unknown_snapshot_is_a_failure_of_its_own", {}),
    (draws_depend_on_earlier_requests, "test_cancelled_sample_leaves_others_alone", {}),
    *((company_shifts_logprobs, "test_neighbours_make_no_difference", {"neighbours": n}) for n in (1, 2, 8)),
    (diverged_weights_are_answered, "test_a_diverged_snapshot_is_refused_by_name", {"number": np.nan}),
    (nan_stays_where_it_was, "test_a_diverged_neighbour_makes_no_difference", {"kind": "nan"}),
    (streams_skip_the_first_token, "test_a_stream_tells_what_is_sampled", {}),
    (streams_draw_otherwise, "test_a_stream_tells_what_is_sampled", {}),
    (cancelling_is_swallowed, "test_cancelled_sample_leaves_others_alone", {}),
    (moves(stay), "test_running_samples_go_on_with_newer_weights", {}),
    (moves(stay), "test_later_samples_are_drawn_with_newer_weights", {}),
    (moves_are_not_told, "test_running_samples_go_on_with_newer_weights", {}),
    (moved_sequences_forget, "test_what_has_been_computed_stays", {}),
    (drawn_tokens_are_cached, "test_nobody_finds_what_several_weights_computed", {}),
    (moves(move_everybody), "test_moves_of_others_make_no_difference", {}),
]


def make_toy(directory: Path) -> ToyBackend:
    losses = {spec.name: spec for spec in BUILTIN_LOSSES}
    context = BackendContext(model_name="toy", model_path=None, cache_dir=directory, losses=losses)
    return ToyBackend(ToyConfig(), context)


def parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


async def run(test: str, backend: ToyBackend, directory: Path, arguments: dict[str, Any]) -> None:
    """Call one test of the suites as pytest would, with the fixtures that it names."""
    suites: list[Any] = [TrainingBackendContract, SamplingBackendContract, CheckpointContract]
    suite = next(s for s in suites if hasattr(s, test) and arguments.keys() <= parameters(getattr(s, test)).keys())()
    driver = ModelDriver(backend)
    shapes_of = driver.create()
    shapes = {name: array.shape for name, array in driver.state(shapes_of).weights.items()}
    vocab_size = backend.sampler_capabilities.vocab_size
    fixtures = {
        "backend": backend,
        "driver": driver,
        "sleeper": backend,
        "tmp_path": directory,
        "eos_token": vocab_size - 1,
        "detokenize": lambda tokens: "".join(toy_sampling.text_of(t, vocab_size) for t in tokens),
        "record_property": dict[str, object]().__setitem__,
        "adapter_shapes": shapes,
        "shapes_if_any": shapes,
        **arguments,
    }
    driver.unload(shapes_of)
    function = getattr(suite, test)
    names = parameters(function)
    if "busy" in names:
        fixtures["busy"] = type(suite).busy.__wrapped__(suite, driver)
    outcome = function(**{name: fixtures[name] for name in names})
    if inspect.isawaitable(outcome):
        await outcome


@pytest.mark.parametrize(("fault", "test", "arguments"), FAULTS)
async def test_suite_catches(
    fault: Fault, test: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await run(test, make_toy(tmp_path), tmp_path, arguments)  # without the fault the test passes
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, WrongResultError, pytest.fail.Exception)):
        await run(test, make_toy(tmp_path), tmp_path / "again", arguments)


class Cheating(TrainingBackendContract):
    def test_gradients_add_up(self, driver: ModelDriver) -> None:
        """Replaces the original."""


class Honest(TrainingBackendContract):
    @pytest.mark.xfail(reason="gradients are kept in bfloat16")
    def test_gradients_add_up(self, driver: ModelDriver) -> None:
        super().test_gradients_add_up(driver)


def test_overriding_needs_a_reason() -> None:
    with pytest.raises(AssertionError, match="Cheating overrides test_gradients_add_up"):
        Cheating().test_overridden_tests_are_expected_failures()
    Honest().test_overridden_tests_are_expected_failures()
