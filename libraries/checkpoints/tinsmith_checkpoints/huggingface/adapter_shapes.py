"""Which modules of a base model an adapter may change, and the shapes of its weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tinsmith_checkpoints.huggingface.decoder import EXPERT_MODULES, HEAD
from tinsmith_checkpoints.huggingface.language_part import decoder_names
from tinsmith_checkpoints.huggingface.peft_layout import Side

_EXPERT: Final = re.compile(r"(?P<experts>.+\.(?:mlp|mixer)\.experts)\.(?P<number>\d+)\.(?P<module>\w+)")
_JOINED: Final = {module: name for name, module in EXPERT_MODULES.items()}
_OF_MAMBA: Final = ".mixer.out_proj.weight"  # which PEFT refuses
_SHARE_A: Final = frozenset({"gate_proj", "up_proj"})


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A matrix, or the matrices of a layer's experts, which share one LoRA factor."""

    size_out: int
    size_in: int
    experts_A: tuple[int, ...] = ()
    experts_B: tuple[int, ...] = ()

    def shape(self, side: Side, rank: int) -> tuple[int, ...]:
        return (*self.experts_A, rank, self.size_in) if side == "A" else (*self.experts_B, self.size_out, rank)


def adapted_modules(base_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, AdaptedModule]:
    """Return what can be adapted, by the module paths in adapters, given the shapes of a base model's tensors."""
    found: dict[str, AdaptedModule] = {}
    for name, stored in decoder_names(base_shapes).items():
        shape = base_shapes[stored]
        if name.endswith(".weight") and len(shape) == 2 and not name.endswith(_OF_MAMBA):
            module = name.removesuffix(".weight")
            expert = _EXPERT.fullmatch(module)
            if expert is None:
                found[module] = AdaptedModule(*shape)
            elif expert["module"] in _JOINED:
                joined = f"{expert['experts']}.{_JOINED[expert['module']]}"
                number = max(int(expert["number"]) + 1, *_num_experts(found.get(joined)))
                own, shared = (number,), (1,)
                axes = (shared, own) if expert["module"] in _SHARE_A else (own, shared)
                found[joined] = AdaptedModule(*shape, *axes)
    if HEAD not in found and "model.embed_tokens" in found:
        found[HEAD] = found["model.embed_tokens"]  # a tied head
    return found


def _num_experts(module: AdaptedModule | None) -> tuple[int, int]:
    return (0, 0) if module is None else (module.experts_A[0], module.experts_B[0])
