"""The sampling half of the jax backend on its own, for models that another backend trains."""

from tinsmith import BackendContext, SamplerCapabilities
from tinsmith.machine import FairLock
from tinsmith_checkpoints.huggingface import StopRules
from tinsmith_jax import native, runtime
from tinsmith_jax.compilation import Programs
from tinsmith_jax.config import JaxSamplerConfig, as_trainer
from tinsmith_jax.families import read_config
from tinsmith_jax.memory import usable_bytes
from tinsmith_jax.mesh import device_name, make_layout
from tinsmith_jax.sampler import Sampler
from tinsmith_jax.sampling_device import sampling_device
from tinsmith_jax.sampling_values import MAX_PROMPT_DRAWS
from tinsmith_jax.weights import load_base


class JaxSampler(Sampler):
    """A sampler with its own copy of the base model. It loads any trainer's snapshots from their host weights."""

    def __init__(self, config: JaxSamplerConfig, context: BackendContext) -> None:
        context.progress("starting jax", None)
        model = read_config(context.model_directory)
        whole = as_trainer(config)
        runtime.prepare(context.cache_dir, kernels=native.suits(whole, model))
        memory = usable_bytes(context.placement.memory_bytes)
        budget = runtime.divided(whole, model, memory, trains=False, samples=True)
        limits = runtime.decide(whole, model, budget=budget)
        layout = None if config.mesh is None else make_layout(config.mesh, model, exact=limits.exact)
        base = load_base(
            context.model_directory,
            model,
            limits.dtype,
            context.progress,
            layout,
            widens=limits.kernels.native and native.widens(model),
        )
        self._programs = Programs(context.progress, figures=context.figures)
        device = sampling_device(
            budget, limits, model, base, layout,
            programs=self._programs, device_lock=FairLock(), routing_replay=context.routing_replay,
        )  # fmt: skip
        rules = StopRules.of_model(context.model_directory)
        capabilities = SamplerCapabilities(
            device=device_name(layout),
            dtype=limits.dtype,
            vocab_size=model.vocab_size,
            max_context_tokens=limits.max_context_tokens,
            max_lora_rank=config.max_lora_rank,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            isolation="bitwise" if limits.exact else "close",
            prompt_logprobs=True,
            target_prompt_logprobs=True,
            max_topk_logprobs=min(config.max_topk_logprobs, model.vocab_size),
            max_prompt_alt_tokens=MAX_PROMPT_DRAWS,
            stop_strings=rules.tokenizer is not None,
            returns_routed_experts=device.shape.returns_experts,
            max_sequences=device.shape.num_slots,
            max_snapshots=budget.max_snapshots,
            inflight="between_tokens",
        )
        super().__init__(
            device,
            model,
            capabilities=capabilities,
            rules=rules,
            prefill_tokens=config.prefill_tokens,
            figures=context.figures,
        )
        if config.warm_up:
            self._programs.start_warm_up(list(device.all_programs()))

    def close(self) -> None:
        super().close()
        self._programs.close()
