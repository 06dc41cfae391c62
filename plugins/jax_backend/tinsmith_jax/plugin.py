"""The hooks of tinsmith-jax. Imported in every process: no jax here."""

import tinsmith
from tinsmith.backend import BackendContext, BackendSpec, TrainingBackend
from tinsmith_jax.config import JaxConfig


def create(config: JaxConfig, context: BackendContext) -> TrainingBackend:
    """Load the model; takes as long as reading its files."""
    from tinsmith_jax.backend import JaxBackend

    return JaxBackend(config, context)


@tinsmith.hookimpl
def tinsmith_register_backends() -> BackendSpec[JaxConfig]:
    return BackendSpec(
        name="jax",
        config=JaxConfig,
        create=create,
        description="trains and samples dense Qwen3 and Llama 3 models with JAX on CPU, GPU or TPU",
    )
