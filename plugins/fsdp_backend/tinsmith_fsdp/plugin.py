"""The hooks of tinsmith-fsdp. Imported in every process: no torch here."""

from tinsmith import BackendContext, BackendSpec, TrainingBackend, hookimpl
from tinsmith_fsdp.config import FsdpConfig


def create(config: FsdpConfig, context: BackendContext) -> TrainingBackend:
    """Start the ranks and load the model; takes as long as reading its files."""
    from tinsmith_fsdp.backend import FsdpBackend

    return FsdpBackend(config, context)


@hookimpl
def tinsmith_register_backends() -> BackendSpec[FsdpConfig]:
    return BackendSpec(
        name="fsdp",
        config=FsdpConfig,
        create=create,
        description="trains transformers models with PyTorch FSDP2, one process per GPU (or CPU rank), on many nodes",
        samples=False,
    )
