"""The PEFT adapter layout: names and shapes of the weights, and the `adapter_config.json` beside them.

Names: `base_model.model.<module path>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank]. The weights of
expert modules have an axis of experts before these two.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

from tinsmith_checkpoints.errors import ServerError
from tinsmith_checkpoints.huggingface.decoder import (
    ATTENTION,
    DELTA,
    EXPERTS,
    HEAD,
    LATENT,
    MAMBA,
    MLP,
    SHARED_EXPERT,
    SHARED_EXPERTS,
)
from tinsmith_checkpoints.values import Array, FloatArray, LoraConfig

TINKER_HEAD: Final = "model.unembed_tokens"
"""The name of the output head in Tinker's own service. tinker-cookbook's merge recognises it as the head of a tied
model, which has no `lm_head.weight`."""

Side = Literal["A", "B"]
SIDES: Final[tuple[Side, Side]] = ("A", "B")

_KINDS: Final = (*ATTENTION, *MLP, HEAD, *EXPERTS, *SHARED_EXPERT, *DELTA, *LATENT, *SHARED_EXPERTS, *MAMBA)
"""Their order determines each module's random stream."""

_NAME = re.compile(r"base_model\.model\.(?P<module>[A-Za-z0-9_.]+)\.lora_(?P<side>[AB])\.weight")


def adapter_config(base_model: str, lora: LoraConfig, weights: Mapping[str, Array]) -> dict[str, Any]:
    """Return the adapter_config.json for PEFT and vLLM, with every value that they would otherwise guess."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": target_modules(weights),
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }


def weight_name(module: str, side: Side) -> str:
    """Return a weight's name for a module path such as `model.layers.0.self_attn.q_proj` or `lm_head`."""
    return f"base_model.model.{module}.lora_{side}.weight"


def rename_module(name: str, old: str, new: str) -> str:
    """Return a weight's name, with the module called `new` if it is called `old`."""
    return name.replace(f"base_model.model.{old}.lora_", f"base_model.model.{new}.lora_")


def draw_lora_A(lora: LoraConfig, kind: str, layer: int, in_features: int, *, expert: int | None = None) -> FloatArray:
    """Draw the initial A [rank, in] of a module: uniform within 1 / sqrt(in), from the adapter's seed.

    `kind` is the module's path within its layer, or `lm_head` with layer 0; `expert` is set if A is one expert's own.
    Each has its own random stream, so it draws the same numbers on every backend, whichever other modules are trained.
    """
    key = (_KINDS.index(kind), layer, *(() if expert is None else (expert,)))
    stream = np.random.SeedSequence(lora.seed % 2**64, spawn_key=key)
    bound = in_features**-0.5
    drawn = np.random.default_rng(stream).uniform(-bound, bound, (in_features, lora.rank))
    return np.ascontiguousarray(drawn.T.astype(np.float32))


def target_modules(weights: Mapping[str, Array]) -> list[str]:
    """Return the last parts of the module paths that have weights, such as `q_proj`, sorted."""
    return sorted({parse(name)[0].rpartition(".")[2] for name in weights})


def check_weights(lora: LoraConfig, weights: Mapping[str, Array]) -> None:
    """Raise ServerError, naming the tensor, if names or shapes do not match an adapter of this rank."""
    check_shapes(lora, {name: array.shape for name, array in weights.items()})


def check_shapes(lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Do as `check_weights`, given the shapes alone."""
    sides = {parse(name) for name in shapes}
    for name, shape in shapes.items():
        module, side = parse(name)
        rank_axis = -2 if side == "A" else -1
        if len(shape) not in (2, 3) or shape[rank_axis] != lora.rank:
            msg = f"tensor {name!r} has the shape {list(shape)}; rank {lora.rank} needs it at axis {rank_axis}"
            raise ServerError(msg)
        other = "B" if side == "A" else "A"
        if (module, other) not in sides:
            msg = f"tensor {name!r} has no lora_{other} beside it"
            raise ServerError(msg)


def parse(name: str) -> tuple[str, Side]:
    """Split a name into module path and side, "A" or "B". Raise ServerError if the name is malformed."""
    match = _NAME.fullmatch(name)
    if match is None:
        msg = f"tensor {name!r} is not named base_model.model.<module path>.lora_A.weight or .lora_B.weight"
        raise ServerError(msg)
    return match["module"], "A" if match["side"] == "A" else "B"
