"""The toy backend: a complete backend in NumPy, for tests, for trying things out, and to read before writing one.

It trains and samples, needs no model directory, and is exact: the same operations give the same bits, alone or in
company. The model is in `toy_model.py`, training state in `toy_training.py`, drawing tokens in `toy_sampling.py`; this
file is the contract.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from tinsmith.backend import (
    BackendConfig,
    BackendContext,
    BackendSpec,
    HostSnapshot,
    ModelState,
    OnTokens,
    SamplerCapabilities,
    SamplingBackend,
    Snapshot,
    TrainerCapabilities,
    TrainingBackend,
)
from tinsmith.builtin import toy_sampling, toy_training
from tinsmith.builtin.toy_model import Adapter, ToyModel
from tinsmith.builtin.toy_sampling import Loaded
from tinsmith.builtin.toy_training import TrainedModel
from tinsmith.divergence import NOT_FINITE, are_finite, step_result, unless_diverged
from tinsmith.errors import CapacityError, UserError
from tinsmith.hookspecs import hookimpl
from tinsmith.operations import (
    Array,
    CreateModel,
    Failed,
    FloatArray,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    OptimStep,
    OptimStepOutput,
    Sample,
    SampleOutput,
)


class ToyConfig(BackendConfig):
    vocab_size: int = Field(64, ge=32, le=4096, description="token i is the character chr(32 + i); the last one is EOS")
    hidden_size: int = Field(16, ge=1, le=256)
    max_context_tokens: int = Field(512, ge=64)
    max_batch_tokens: int = Field(8192, ge=64, description="of one merged call")
    max_lora_rank: int = Field(64, ge=1)
    max_models: int = Field(64, ge=1)
    seed: int = Field(0, ge=0, description="of the base weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """The arrays that a real backend would hold on its device."""

    model: ToyModel
    models: dict[str, TrainedModel] = field(default_factory=dict)
    snapshots: dict[str | None, Adapter]  # None: the base model
    newer: dict[str | None, Loaded] = field(default_factory=dict)  # with which samples of a snapshot go on


class ToyBackend(TrainingBackend, SamplingBackend):
    def __init__(self, config: ToyConfig, context: BackendContext) -> None:
        self._losses = context.losses
        self._figures = context.figures
        model = ToyModel(vocab_size=config.vocab_size, hidden_size=config.hidden_size, seed=config.seed)
        self._awake: _Device | None = _Device(model=model, snapshots={None: Adapter(weights={}, scale=1.0)})
        self._asleep = b""  # what the device held, while the backend sleeps
        self._trainer_capabilities = TrainerCapabilities(
            device="cpu",
            dtype="float32",  # of its results; inside it is more exact
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_context_tokens,
            max_batch_tokens=config.max_batch_tokens,
            max_models=config.max_models,
            losses=frozenset(context.losses),
            max_lora_rank=config.max_lora_rank,
            full_fine_tuning=True,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            max_targets_per_token=config.vocab_size,
            deterministic=True,
            isolation="bitwise",
        )
        self._sampler_capabilities = SamplerCapabilities(
            device="cpu",
            dtype="float32",
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_context_tokens,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            full_fine_tuning=True,
            max_lora_rank=config.max_lora_rank,
            isolation="bitwise",
            prompt_logprobs=True,
            target_prompt_logprobs=True,
            max_topk_logprobs=config.vocab_size,
            max_prompt_alt_tokens=64,
            stop_strings=True,
            max_sequences=32,
            inflight="between_tokens",
        )

    @property
    def trainer_capabilities(self) -> TrainerCapabilities:
        return self._trainer_capabilities

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self._sampler_capabilities

    # Training ---------------------------------------------------------------------------------------------------------

    def create_model(self, op: CreateModel) -> None:
        limits = self._trainer_capabilities
        if not 0 <= op.lora.rank <= limits.max_lora_rank:
            msg = f"rank {op.lora.rank} is not supported; it may be 1 to {limits.max_lora_rank}, or 0: all weights"
            raise UserError(msg)
        if len(self.device.models) >= limits.max_models:
            msg = f"all {limits.max_models} places for models are taken; end a session first"
            raise CapacityError(msg)
        self.device.models[op.model_id] = TrainedModel(lora=op.lora, weights=self.device.model.init_lora(op.lora))

    def unload_model(self, model_id: str) -> None:
        del self.device.models[model_id]

    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        return [self.score(op, backward=False) for op in ops]

    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        return [self.score(op, backward=True) for op in ops]

    def score(self, op: ForwardBackward, *, backward: bool) -> ForwardBackwardOutput:
        self._figures.computed(tokens=op.num_tokens, padding=0)
        spec, model = self._losses[op.loss_fn], self.device.models[op.model_id]
        scored = [
            toy_training.score(self.device.model, model.adapter, datum, spec, op.loss_fn_config, backward=backward)
            for datum in op.data
        ]
        if backward:
            for result in scored:
                model.accumulate(result.gradients)
        loss = sum(result.loss for result in scored)  # a plain sum: never divided by tokens, weights or data
        metrics = {"loss:sum": loss}
        if backward and not are_finite(model.gradients):
            metrics[NOT_FINITE] = 1.0
        return ForwardBackwardOutput(loss_fn_outputs=tuple(result.outputs for result in scored), metrics=metrics)

    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        norms = [self.device.models[op.model_id].optim_step(op.adam) for op in ops]
        return [step_result(norm, op.adam) for norm, op in zip(norms, ops, strict=True)]

    def drop_gradient(self, model_id: str) -> None:
        self.device.models[model_id].gradients = {}

    # State -----------------------------------------------------------------------------------------------------------

    def capture_state(self, model_id: str) -> ModelState:
        model = self.device.models[model_id]
        return ModelState(
            lora=model.lora,
            weights=_copies(model.weights),
            adam_m=_copies(model.adam_m),
            adam_v=_copies(model.adam_v),
            gradients=_copies(model.gradients),
            step=model.step,
        )

    def restore_state(self, model_id: str, state: ModelState) -> None:
        self.device.models[model_id] = TrainedModel(
            lora=state.lora,
            weights=_copies(state.weights),
            adam_m=_copies(state.adam_m),
            adam_v=_copies(state.adam_v),
            gradients=_copies(state.gradients),
            step=state.step,
        )

    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        model = self.device.models[model_id]
        return HostSnapshot(snapshot_id, model.lora, _copies(model.weights))

    # Sampling ---------------------------------------------------------------------------------------------------------

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        adapter = Adapter(weights=dict(snapshot.adapter_weights()), scale=snapshot.lora.scale)
        self.device.snapshots.setdefault(snapshot.snapshot_id, adapter)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        self.device.snapshots.pop(snapshot_id, None)  # samples that are running hold the weights themselves
        self.device.newer.pop(snapshot_id, None)

    async def move_samples(self, snapshot_id: str, newer_id: str) -> None:
        self.device.newer[snapshot_id] = Loaded(newer_id, self.device.snapshots[newer_id])

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self._sample(op)

    async def sample_streaming(self, op: Sample, on_tokens: OnTokens) -> SampleOutput | Failed:
        return await self._sample(op, on_tokens)

    async def _sample(self, op: Sample, on_tokens: OnTokens | None = None) -> SampleOutput | Failed:
        adapter = self.device.snapshots.get(op.snapshot_id)
        if adapter is None:
            return Failed(message=f"snapshot {op.snapshot_id!r} is not loaded", category="server")
        vocab_size = self.sampler_capabilities.vocab_size
        output = await toy_sampling.sample(
            self.device.model, adapter, op, vocab_size, on_tokens, lambda: self.device.newer.get(op.snapshot_id)
        )
        return unless_diverged(op, output)

    # Sleep ------------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> _Device:
        if self._awake is None:
            msg = "the toy backend sleeps: wake it first"
            raise RuntimeError(msg)
        return self._awake

    def sleep_trainer(self) -> None:
        if self._awake is not None:
            self._asleep, self._awake = pickle.dumps(self._awake), None

    def wake_trainer(self) -> None:
        if self._awake is None:
            self._asleep, self._awake = b"", pickle.loads(self._asleep)

    def close(self) -> None:
        self._asleep, self._awake = b"", None


def _copies(arrays: Mapping[str, Array]) -> dict[str, FloatArray]:
    return {name: np.array(array, np.float32) for name, array in arrays.items()}


@hookimpl
def tinsmith_register_backends() -> BackendSpec[ToyConfig]:
    return BackendSpec(
        name="toy",
        config=ToyConfig,
        create=ToyBackend,
        description="a NumPy model of a few thousand weights, for tests and for trying things out",
        needs_model_path=False,
    )
