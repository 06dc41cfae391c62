"""Which weights of a base model an adapter changes, and which of its tensors make up each change."""

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith_checkpoints.huggingface.decoder import EXPERT_MODULES
from tinsmith_checkpoints.huggingface.peft_layout import parse, weight_name
from tinsmith_checkpoints.values import Array


@dataclass(frozen=True, slots=True)
class Delta:
    """The adapter's tensors whose product, times the scale, is added to a base weight.

    If a tensor has an axis of experts, the index on it says which part of it.
    """

    A: str
    B: str
    index_A: int | None = None
    index_B: int | None = None

    def factors(self, weights: Mapping[str, Array]) -> tuple[Array, Array]:
        """Return A [rank, in] and B [out, rank]."""
        A, B = weights[self.A], weights[self.B]
        return A if self.index_A is None else A[self.index_A], B if self.index_B is None else B[self.index_B]


def deltas(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Delta]:
    """Return the changes by the names of the base weights, given the shapes of the adapter's tensors.

    A delta on the head of a tied model changes `lm_head.weight`, which such a model does not have.
    """
    found: dict[str, Delta] = {}
    for module in sorted({parse(name)[0] for name in shapes}):
        A, B = weight_name(module, "A"), weight_name(module, "B")
        if len(shapes[A]) == 2:
            found[f"{module}.weight"] = Delta(A, B)
            continue
        experts, _, name = module.rpartition(".")
        num_A, num_B = shapes[A][0], shapes[B][0]
        for number in range(max(num_A, num_B)):
            weight = f"{experts}.{number}.{EXPERT_MODULES[name]}.weight"
            found[weight] = Delta(A, B, number % num_A, number % num_B)
    return found
