"""The context that core passes to a backend's `create`, for tests that create a backend themselves."""

from pathlib import Path

from tinsmith.backend import BackendContext
from tinsmith.losses import BUILTIN_LOSSES


def backend_context(cache_dir: Path, *, model_path: Path | None = None) -> BackendContext:
    """Return a context with the built-in losses; `model_path` is for backends that read a Hugging Face directory."""
    losses = {loss.name: loss for loss in BUILTIN_LOSSES}
    return BackendContext(model_name="contract", model_path=model_path, cache_dir=cache_dir, losses=losses)
