"""The jax backend: a trainer and a sampler that share one copy of the base model and take turns on the device."""

from functools import partial
from itertools import chain, zip_longest
from typing import Any

import jax

from tinsmith import (
    BackendContext,
    Capabilities,
    ConfigError,
    Failed,
    Sample,
    SampleOutput,
    SamplingBackend,
    ServerError,
    Snapshot,
    StopRules,
)
from tinsmith_jax import runtime
from tinsmith_jax.compilation import Program, Programs
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.loss_table import LossTable
from tinsmith_jax.mesh import Layout, make_layout
from tinsmith_jax.model_config import read_config
from tinsmith_jax.sampler import Sampler
from tinsmith_jax.sampling_only import sampling_device
from tinsmith_jax.train_step import TrainPrograms
from tinsmith_jax.trainer import Trainer
from tinsmith_jax.turns import Turns
from tinsmith_jax.weights import load_base


class JaxBackend(Trainer, SamplingBackend):
    """A trainer that can also sample. Starts compiling in the background when it is constructed.

    A program that is needed before the background thread has compiled it is compiled on demand.
    """

    def __init__(self, config: JaxConfig, context: BackendContext) -> None:
        context.progress("starting jax", None)
        runtime.prepare(context.cache_dir)
        self.model_config = read_config(context.model_directory)
        self.limits = runtime.decide(config, self.model_config)
        layout = self._layout(config, samples=context.samples)
        base = load_base(context.model_directory, self.model_config, self.limits.dtype, context.progress, layout)
        shapes = jax.tree.map(partial(_shape_of, on_mesh=layout is not None), base)
        losses = LossTable(context.losses)
        train = TrainPrograms(
            config=self.model_config, limits=self.limits, losses=losses, base_shapes=shapes, layout=layout
        )
        self.programs = Programs(context.progress)
        turns = Turns()
        self.train_programs = train
        super().__init__(base, self.programs, train, config.max_models, turns.turn)
        rules = StopRules.of_model(context.model_directory)
        self._capabilities = self._describe(config, losses, rules, samples=context.samples)
        self._own_sampler: Sampler | None = None
        sampling_programs: list[Program] = []
        if context.samples:
            device = sampling_device(config, self.limits, self.model_config, base, programs=self.programs, turns=turns)
            self._own_sampler = Sampler(
                device,
                self.model_config,
                capabilities=self._capabilities,
                rules=rules,
                prefill_tokens=config.prefill_tokens,
            )
            sampling_programs = device.all_programs()
        if config.warm_up:
            in_turn = chain.from_iterable(zip_longest(train.all(), sampling_programs))
            self.programs.start_warm_up([program for program in in_turn if program is not None])

    def _layout(self, config: JaxConfig, *, samples: bool) -> Layout | None:
        if config.mesh is None:
            return None
        if samples:
            msg = "mesh: the jax backend does not sample on a mesh yet; configure a sampler for this model besides"
            raise ConfigError(msg)
        return make_layout(config.mesh, self.model_config, exact=self.limits.exact)

    def _describe(self, config: JaxConfig, losses: LossTable, rules: StopRules, *, samples: bool) -> Capabilities:
        return Capabilities(
            device=self._device(),
            dtype=self.limits.dtype,
            vocab_size=self.model_config.vocab_size,
            max_context_tokens=self.limits.max_context_tokens,
            max_batch_tokens=self.limits.max_batch_tokens * self.train_programs.axes.num_streams,
            max_models=config.max_models,
            losses=frozenset(losses.kinds),
            max_lora_rank=config.max_lora_rank,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            max_targets_per_token=self.limits.max_targets,
            deterministic=self.limits.platform == "cpu",
            # not measured on other devices: no claim of bitwise isolation, and no isolation_error to report
            isolation="bitwise" if self.limits.exact else "close",
            sampling=samples,
            prompt_logprobs=True,
            target_prompt_logprobs=True,
            max_topk_logprobs=min(config.max_topk_logprobs, self.model_config.vocab_size),
            stop_strings=rules.tokenizer is not None,
            max_sequences=config.decode_slots,
        )

    def _device(self) -> str:
        kind, number = jax.devices()[0].device_kind, self.train_programs.axes.num_devices
        return str(kind) if number == 1 else f"{number} x {kind}"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        await self._sampler.load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await self._sampler.drop_snapshot(snapshot_id)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self._sampler.sample(op)

    @property
    def _sampler(self) -> Sampler:
        if self._own_sampler is None:
            msg = "this model has a separate sampler; the jax backend only trains it"
            raise ServerError(msg)
        return self._own_sampler

    def close(self) -> None:
        """End samples and the warm-up. The arrays are freed with the object."""
        if self._own_sampler is not None:
            self._own_sampler.close()
        self.programs.close()


def _shape_of(array: Any, *, on_mesh: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding if on_mesh else None)
