"""How much a checkpoint will take on the disk, before it is written."""

from collections.abc import Mapping

from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors
from tinsmith_checkpoints.values import Array, CheckpointKind, ModelState


def size_of(state: ModelState, kind: CheckpointKind) -> int:
    """Return the size of its tensors; lazy mappings that do not state a size are left out."""
    if kind != "training":
        return _size(state.weights)
    return sum(map(_size, (state.weights, state.adam_m, state.adam_v, state.gradients)))


def _size(tensors: Mapping[str, Array]) -> int:
    if isinstance(tensors, StoredTensors):
        return sum(tensor.num_bytes for tensor in tensors.stored.values())
    if isinstance(tensors, dict):
        return sum(array.nbytes for array in tensors.values())
    return int(getattr(tensors, "nbytes", 0))
