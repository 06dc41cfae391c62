"""The jax backend: a trainer and a sampler that share one copy of the base model and take turns on the device."""

from tinsmith import (
    BackendContext,
    Failed,
    OnTokens,
    ReplayedExperts,
    Sample,
    SampleOutput,
    SamplerCapabilities,
    SamplingBackend,
    ServerError,
    Snapshot,
    TrainerCapabilities,
)
from tinsmith_checkpoints.huggingface import StopRules
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.devices import Devices, Setup
from tinsmith_jax.families import read_config
from tinsmith_jax.loss_table import LossTables
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.remote import RemoteDevices
from tinsmith_jax.runtime import Limits
from tinsmith_jax.sampler import Sampler
from tinsmith_jax.sampling_values import MAX_PROMPT_DRAWS, SamplingShape
from tinsmith_jax.trainer import Trainer
from tinsmith_workers import MakeLauncher


class JaxBackend(Trainer, SamplingBackend):
    """A trainer that can also sample. Starts compiling in the background when it is constructed.

    A program that is needed before the background thread has compiled it is compiled on demand. With a mesh, workers
    have the devices, and this process none.
    """

    def __init__(self, config: JaxConfig, context: BackendContext, launch_with: MakeLauncher | None = None) -> None:
        setup = Setup(
            config=config,
            model_directory=context.model_directory,
            cache_dir=context.cache_dir,
            losses=dict(context.losses),
            samples=context.placement.samples,
            routing_replay=context.routing_replay,
            memory_bytes=context.placement.memory_bytes,
        )
        self.model_config = read_config(context.model_directory)
        self.devices: Devices | RemoteDevices
        if config.mesh is None:
            self.devices = Devices(setup, context.progress, context.figures)
        else:
            self.devices = RemoteDevices(setup, context.progress, launch_with, context.figures)
        facts, losses = self.devices.facts, LossTables(context.losses)
        super().__init__(
            self.devices.training,
            facts.limits,
            facts.buckets,
            losses,
            budget=facts.budget,
            experts=_replayed_experts(self.model_config),
            always_replays=context.routing_replay,
            side_by_side=_half_busy(facts.limits, config, self.model_config),
            figures=context.figures,
        )
        rules = StopRules.of_model(context.model_directory)
        self._trainer_capabilities = self._as_trainer(config, losses)
        self._own_sampler: Sampler | None = None
        if self.devices.sampling is not None:
            self._own_sampler = Sampler(
                self.devices.sampling,
                self.model_config,
                capabilities=self._as_sampler(config, self.devices.sampling.shape, rules),
                rules=rules,
                prefill_tokens=config.prefill_tokens,
                figures=context.figures,
            )
        if config.warm_up:
            self.devices.start_warm_up()

    def _as_trainer(self, config: JaxConfig, losses: LossTables) -> TrainerCapabilities:
        facts = self.devices.facts
        return TrainerCapabilities(
            device=facts.name,
            dtype=self.limits.dtype,
            vocab_size=self.model_config.vocab_size,
            max_context_tokens=self.limits.max_context_tokens,
            max_batch_tokens=self.limits.max_batch_tokens * facts.buckets.num_streams,
            max_models=facts.budget.max_models,
            losses=losses.names,
            max_lora_rank=config.max_lora_rank,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            replayed_experts=_replayed_experts(self.model_config),
            max_targets_per_token=self.limits.max_targets,
            deterministic=self.limits.platform == "cpu",
            # not measured on other devices: no claim of bitwise isolation, and no isolation_error to report
            isolation="bitwise" if self.limits.exact else "close",
        )

    def _as_sampler(self, config: JaxConfig, shape: SamplingShape, rules: StopRules) -> SamplerCapabilities:
        facts = self.devices.facts
        return SamplerCapabilities(
            device=facts.name,
            dtype=self.limits.dtype,
            vocab_size=self.model_config.vocab_size,
            max_context_tokens=self.limits.max_context_tokens,
            max_lora_rank=config.max_lora_rank,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            isolation="bitwise" if self.limits.exact else "close",
            prompt_logprobs=True,
            target_prompt_logprobs=True,
            max_topk_logprobs=min(config.max_topk_logprobs, self.model_config.vocab_size),
            max_prompt_alt_tokens=MAX_PROMPT_DRAWS,
            stop_strings=rules.tokenizer is not None,
            returns_routed_experts=shape.returns_experts,
            max_sequences=shape.num_slots,
            max_snapshots=facts.budget.max_snapshots,
            inflight="between_tokens",
        )

    @property
    def trainer_capabilities(self) -> TrainerCapabilities:
        return self._trainer_capabilities

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self.sampler.sampler_capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        await self.sampler.load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await self.sampler.drop_snapshot(snapshot_id)

    async def move_samples(self, snapshot_id: str, newer_id: str) -> None:
        await self.sampler.move_samples(snapshot_id, newer_id)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self.sampler.sample(op)

    async def sample_streaming(self, op: Sample, on_tokens: OnTokens) -> SampleOutput | Failed:
        return await self.sampler.sample_streaming(op, on_tokens)

    @property
    def sampler(self) -> Sampler:
        if self._own_sampler is None:
            msg = "this model has a separate sampler; the jax backend only trains it"
            raise ServerError(msg)
        return self._own_sampler

    def close(self) -> None:
        """End samples and the warm-up. The arrays are freed with the object."""
        if self._own_sampler is not None:
            self._own_sampler.close()
        self.devices.close()


def _half_busy(limits: Limits, config: JaxConfig, model: ModelConfig) -> bool:
    """Return whether a pass leaves a part of the CPU to another: XLA's goes through attention tile by tile."""
    return limits.platform == "cpu" and config.mesh is None and model.experts is None and not limits.kernels.native


def _replayed_experts(config: ModelConfig) -> ReplayedExperts | None:
    shape = config.experts
    if shape is None:
        return None
    return ReplayedExperts(num_layers=config.expert_layers, num_experts=shape.num_experts, top_k=shape.top_k)
