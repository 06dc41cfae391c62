"""Find base models by name: a directory, or a model of the Hugging Face hub that is in this machine's cache.

This downloads nothing. If no plugin finds a model, its engine downloads it from the hub.
"""

from pathlib import Path

from tinsmith.hookspecs import hookimpl
from tinsmith_checkpoints.huggingface.hub_cache import HubReference, cached_model


@hookimpl
def tinsmith_resolve_base_model(name: str) -> Path | None:
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    reference = HubReference.parse(name)
    return None if reference is None else cached_model(reference)
