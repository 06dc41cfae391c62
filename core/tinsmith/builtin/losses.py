"""The Tinker API's own loss functions."""

from tinsmith.hookspecs import hookimpl
from tinsmith.losses import BUILTIN_LOSSES, LossSpec


@hookimpl
def tinsmith_register_losses() -> list[LossSpec]:
    return list(BUILTIN_LOSSES)
