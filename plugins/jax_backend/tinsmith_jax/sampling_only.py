"""The sampling half of the jax backend by itself: the sampler beside another backend's trainer."""

import jax

from tinsmith.backend import BackendContext, Capabilities, SamplingBackend, Snapshot
from tinsmith.errors import ConfigError
from tinsmith.huggingface.stopping import StopRules
from tinsmith.operations import Failed, Sample, SampleOutput
from tinsmith_jax import runtime
from tinsmith_jax.compilation import Programs
from tinsmith_jax.config import JaxConfig, JaxSamplerConfig
from tinsmith_jax.model_config import ModelConfig, read_model_config
from tinsmith_jax.runtime import Limits
from tinsmith_jax.sampler import Sampler
from tinsmith_jax.sampling_device import SamplingDevice, SamplingShape
from tinsmith_jax.turns import Turns
from tinsmith_jax.weights import Base, load_base


class JaxSampler(SamplingBackend):
    """Holds its own copy of the base model; takes every trainer's snapshots by their host weights."""

    def __init__(self, config: JaxSamplerConfig, context: BackendContext) -> None:
        if context.model_path is None:
            msg = f"model {context.model_name!r} has no directory: set its path to a Hugging Face model directory"
            raise ConfigError(msg)
        context.progress("starting jax", None)
        runtime.prepare(context.cache_dir)
        model = read_model_config(context.model_path)
        whole = JaxConfig.model_validate(config.model_dump())
        limits = runtime.decide(whole, model)
        base = load_base(context.model_path, model, limits.dtype, context.progress)
        self._programs = Programs(context.progress)
        device = sampling_device(whole, limits, model, base, programs=self._programs, turns=Turns())
        rules = StopRules.of_model(context.model_path)
        self._sampler = Sampler(device, model, rules=rules, prefill_tokens=config.prefill_tokens)
        self._capabilities = Capabilities(
            device=jax.devices()[0].device_kind,
            dtype=limits.dtype,
            vocab_size=model.vocab_size,
            max_context_tokens=limits.max_context_tokens,
            max_batch_tokens=limits.max_batch_tokens,
            max_lora_rank=config.max_lora_rank,
            deterministic=limits.platform == "cpu",
            isolation="bitwise" if limits.exact else "close",
            sampling=True,
            prompt_logprobs=True,
            target_prompt_logprobs=True,
            max_topk_logprobs=min(config.max_topk_logprobs, model.vocab_size),
            stop_strings=rules.tokenizer is not None,
        )
        if config.warm_up:
            self._programs.start_warm_up(list(device.all_programs()))

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        await self._sampler.load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await self._sampler.drop_snapshot(snapshot_id)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self._sampler.sample(op)

    def close(self) -> None:
        self._sampler.close()
        self._programs.close()


def sampling_device(
    config: JaxConfig, limits: Limits, model: ModelConfig, base: Base, *, programs: Programs, turns: Turns
) -> SamplingDevice:
    """Prepare the slots of the sampler, with what the settings leave open filled in."""
    shape = SamplingShape(
        num_slots=config.decode_slots,
        max_context_tokens=limits.max_context_tokens,
        max_lora_rank=config.max_lora_rank,
        max_steps=config.decode_steps or (4 if limits.platform == "cpu" else 8),
        max_top=min(config.max_topk_logprobs, model.vocab_size),
        dtype=limits.dtype,
    )
    return SamplingDevice(base, model, shape, programs=programs, turns=turns)
