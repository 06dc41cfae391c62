"""Where the files of a base model keep the matrix of a module: alone, or as a part of a tensor with others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tinsmith_checkpoints.huggingface.decoder import EXPERT_MODULES
from tinsmith_checkpoints.huggingface.joined_rows import JoinedMatrix, joined_matrices
from tinsmith_checkpoints.huggingface.language_part import decoder_names, language_config
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
    alternate, transposed = "GptOssForCausalLM" in (config.get("architectures") or ()), _transposed(config, shapes)
    return {
        own: place
        for name, stored in decoder_names(shapes).items()
        for own, place in _parts(name, stored, shapes[stored], joined, alternate=alternate, transposed=transposed)
    }


def _transposed(config: Mapping[str, Json], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether files have the matrices of experts as [in, out], which their shapes tell: Qwen3-VL's do."""
    hidden = language_config(config).get("hidden_size")
    down = next((shape for name, shape in shapes.items() if name.endswith(f"{_EXPERTS}down_proj")), ())
    return bool(down) and down[-1] == hidden != down[-2]


def _parts(
    name: str,
    stored: str,
    shape: tuple[int, ...],
    joined: Sequence[JoinedMatrix],
    *,
    alternate: bool,
    transposed: bool,
) -> Iterator[tuple[str, Place]]:
    layer, _, rest = name.partition(_EXPERTS)
    matrix = next((each for each in joined if name.endswith(f".{each.path}.weight")), None)
    if rest in {"gate_up_proj", "down_proj"}:
        experts = f"{layer}{_EXPERTS}"
        yield from _of_experts(experts, rest, stored, shape, alternate=alternate, transposed=transposed)
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
    experts: str, what: str, stored: str, shape: tuple[int, ...], *, alternate: bool, transposed: bool
) -> Iterator[tuple[str, Place]]:
    """Take tensors [E, 2 I, H] and [E, H, I], or [E, H, 2 I] and [E, I, H] if `alternate` or `transposed`."""
    number, *of_one = shape
    turned = alternate or transposed
    outputs, inputs = reversed(of_one) if turned else of_one
    modules = (_DOWN,) if what == "down_proj" else (_GATE, _UP)
    size = outputs // len(modules)
    for expert in range(number):
        for i, module in enumerate(modules):
            own = slice(i, None, len(modules)) if alternate else slice(i * size, (i + 1) * size)
            index = (expert, slice(None), own) if turned else (expert, own)
            yield f"{experts}{expert}.{module}.weight", Place(stored, (size, inputs), index, transposed=turned)
