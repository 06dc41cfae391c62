"""A plugin for tests: the toy backend, but with a model's directory, as the backends of real models have one.

It learns nothing from the weights there. It shows that they arrive, in a fraction of the time.
"""

from dataclasses import replace

import tinsmith
from tinsmith.backend import BackendContext, BackendSpec
from tinsmith.builtin import toy_backend
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors

ENTRY_POINTS = "[tinsmith]\nof-a-directory = toy_of_a_directory\n"


def _create(config: toy_backend.ToyConfig, context: BackendContext) -> toy_backend.ToyBackend:
    assert context.model_path is not None
    assert list(StoredTensors.of(context.model_path, "model"))
    return toy_backend.ToyBackend(config, context)


@tinsmith.hookimpl
def tinsmith_register_backends() -> BackendSpec[toy_backend.ToyConfig]:
    toy = toy_backend.tinsmith_register_backends()
    return replace(toy, name="toy-of-a-directory", create=_create, needs_model_path=True)
