"""Where the files of a base model keep the matrix of a module: alone, or as a part of a tensor with others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tinsmith_checkpoints.huggingface.decoder import EXPERT_MODULES
from tinsmith_checkpoints.huggingface.joined_rows import JoinedMatrix, joined_matrices
from tinsmith_checkpoints.huggingface.language_part import decoder_names
from tinsmith_checkpoints.values import Array, Json

_EXPERTS: Final = ".mlp.experts."
_GATE, _UP, _DOWN = EXPERT_MODULES.values()


@dataclass(frozen=True, slots=True)
class Place:
    """A weight of this shape is `tensor[index]`, or that transposed."""

    tensor: str
    shape: tuple[int, ...]
    index: Any = ...  # what NumPy takes between brackets
    transposed: bool = False

    def add(self, change: Array, array: Array) -> None:
        """Add to the weight, in the tensor. The change has the weight's shape."""
        array[self.index] += change.T if self.transposed else change


def weight_places(config: Mapping[str, Json], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Return the places of a model's weights by their names in a decoder that stands alone and joins none.

    Take its config.json, and the shapes of its tensors by their names in files. Tensors of other parts, such as a
    vision tower, are left out.
    """
    joined = joined_matrices(config)
    alternate = "GptOssForCausalLM" in (config.get("architectures") or ())
    return {
        own: place
        for name, stored in decoder_names(shapes).items()
        for own, place in _parts(name, stored, shapes[stored], joined, alternate=alternate)
    }


def _parts(
    name: str, stored: str, shape: tuple[int, ...], joined: Sequence[JoinedMatrix], *, alternate: bool
) -> Iterator[tuple[str, Place]]:
    layer, _, rest = name.partition(_EXPERTS)
    matrix = next((each for each in joined if name.endswith(f".{each.path}.weight")), None)
    if rest in {"gate_up_proj", "down_proj"}:
        yield from _of_experts(f"{layer}{_EXPERTS}", rest, stored, shape, alternate=alternate)
    elif matrix is None:
        yield name, Place(stored, shape)
    else:
        for module in matrix.modules:
            rows = matrix.rows_of(module)
            yield (
                f"{name.removesuffix(f'{matrix.path}.weight')}{module}.weight",
                Place(stored, (len(rows), *shape[1:]), rows),
            )


def _of_experts(
    experts: str, what: str, stored: str, shape: tuple[int, ...], *, alternate: bool
) -> Iterator[tuple[str, Place]]:
    """Take tensors [E, 2 I, H] and [E, H, I], or [E, H, 2 I] and [E, I, H] where gate and up alternate."""
    number, *of_one = shape
    outputs, inputs = reversed(of_one) if alternate else of_one
    modules = (_DOWN,) if what == "down_proj" else (_GATE, _UP)
    size = outputs // len(modules)
    for expert in range(number):
        for i, module in enumerate(modules):
            own = slice(i, None, len(modules)) if alternate else slice(i * size, (i + 1) * size)
            index = (expert, slice(None), own) if alternate else (expert, own)
            yield f"{experts}{expert}.{module}.weight", Place(stored, (size, inputs), index, transposed=alternate)
