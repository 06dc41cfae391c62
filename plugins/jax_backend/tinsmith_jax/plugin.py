"""The hooks of tinsmith-jax. Imported in every process: no jax here."""

import os
from collections.abc import Sequence
from pathlib import Path

from tinsmith import (
    BackendContext,
    BackendSpec,
    Device,
    SamplerSpec,
    SamplingBackend,
    TrainingBackend,
    hookimpl,
)
from tinsmith_jax import native
from tinsmith_jax.config import JaxConfig, JaxSamplerConfig, as_trainer
from tinsmith_jax.families import read_config
from tinsmith_jax.placing import sampler_demand, tell_jax, trainer_demand


def create(config: JaxConfig, context: BackendContext) -> TrainingBackend:
    """Load the model. Takes as long as reading its files."""
    _before_jax(config, context)
    from tinsmith_jax.backend import JaxBackend

    return JaxBackend(config, context)


def diagnose(config: JaxConfig, model_path: Path | None) -> Sequence[Device]:
    """Return JAX's devices. Raise ConfigError if the model is not supported, or JAX sees no GPU."""
    from tinsmith_jax.diagnosis import find_devices

    return find_devices(config, model_path)


def diagnose_sampler(config: JaxSamplerConfig, model_path: Path | None) -> Sequence[Device]:
    """Return JAX's devices. Raise ConfigError as `diagnose` does."""
    from tinsmith_jax.diagnosis import find_devices

    return find_devices(config, model_path)


def create_sampler(config: JaxSamplerConfig, context: BackendContext) -> SamplingBackend:
    """Load the model for sampling alone."""
    _before_jax(as_trainer(config), context)
    from tinsmith_jax.sampling_only import JaxSampler

    return JaxSampler(config, context)


def _before_jax(config: JaxConfig, context: BackendContext) -> None:
    tell_jax(context.placement, os.environ)
    if native.suits(config, read_config(context.model_directory)):
        native.begin(context.cache_dir, os.environ)


@hookimpl
def tinsmith_register_backends() -> BackendSpec[JaxConfig]:
    return BackendSpec(
        name="jax",
        config=JaxConfig,
        create=create,
        description="trains and samples Llama, Qwen, Gemma and other models with JAX on CPU, GPU or TPU",
        diagnose=diagnose,
        demand=trainer_demand,
    )


@hookimpl
def tinsmith_register_samplers() -> SamplerSpec[JaxSamplerConfig]:
    return SamplerSpec(
        name="jax",
        config=JaxSamplerConfig,
        create=create_sampler,
        diagnose=diagnose_sampler,
        description="samples Llama, Qwen, Gemma and other models with JAX, beside another backend's trainer",
        demand=sampler_demand,
    )
