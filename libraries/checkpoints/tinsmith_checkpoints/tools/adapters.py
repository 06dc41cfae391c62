"""Turn a PEFT adapter from anywhere into one of ours; name everything that does not fit."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from tinsmith_checkpoints.errors import ServerError, UnsupportedError, UserError
from tinsmith_checkpoints.huggingface import adapter_fields, peft_layout
from tinsmith_checkpoints.huggingface.adapter_shapes import AdaptedModule, adapted_modules
from tinsmith_checkpoints.huggingface.decoder import EXPERT_MODULES, HEAD
from tinsmith_checkpoints.huggingface.peft_layout import SIDES, TINKER_HEAD, rename_module, weight_name
from tinsmith_checkpoints.tools.contents import Contents
from tinsmith_checkpoints.values import Array, LoraConfig

_ATTENTION: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # of attention by latents
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),  # of layers with the gated delta rule
    "in_proj",  # of Mamba-2
)
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_EXPERTS: Final = tuple(EXPERT_MODULES)
_SEED: Final = 0  # unused: no weight is drawn but of modules that the import lacks


def adapter_of(contents: Contents) -> tuple[LoraConfig, dict[str, Array]]:
    """Return LoRA settings and float32 weights. Raise UnsupportedError naming everything that does not fit.

    Modules may be missing; `complete` checks that there are enough to train.
    """
    if contents.manifest is not None:
        return contents.manifest.lora, {name: contents.weights[name] for name in contents.weights}
    config = contents.adapter_config
    problems = list(adapter_fields.refusals(config))
    known = not problems
    modules: dict[str, set[str]] = {}
    stored = {rename_module(name, TINKER_HEAD, HEAD): name for name in contents.weights}
    for name, stored_name in stored.items():
        try:
            module, side = peft_layout.parse(name)
        except ServerError as error:
            problems.append(str(error))
            continue
        leaf = module.rpartition(".")[2]
        if leaf not in (*_ATTENTION, *_MLP, *_EXPERTS, HEAD):
            allowed = ", ".join((*_ATTENTION, *_MLP, *_EXPERTS, HEAD))
            problems.append(f"module {module!r} is not one that is trained here ({allowed})")
        elif known and module not in modules and (why := adapter_fields.unattached(config, module)) is not None:
            problems.append(f"PEFT would ignore the weights of module {module!r}: {why}; correct the field")
        modules.setdefault(module, set()).add(side)
        rank = contents.weights.stored[stored_name].shape[-2 if side == "A" else -1]
        if rank != config.get("r"):
            problems.append(f"tensor {name!r} has rank {rank}, adapter_config.json says r = {config.get('r')}")
    problems += [
        f"module {module!r} has no lora_{'B' if 'A' in sides else 'A'}"
        for module, sides in modules.items()
        if len(sides) < len("AB")
    ]
    if problems:
        listed = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        msg = f"this adapter does not fit: {listed}"
        raise UnsupportedError(msg)
    leaves = {module.rpartition(".")[2] for module in modules}
    lora = LoraConfig(
        rank=int(config["r"]),
        seed=_SEED,
        alpha=adapter_fields.alpha_of(config),
        train_attn=not leaves.isdisjoint(_ATTENTION),
        train_mlp=not leaves.isdisjoint((*_MLP, *_EXPERTS)),
        train_unembed=HEAD in leaves,
    )
    return lora, {name: contents.weights[stored_name] for name, stored_name in stored.items()}


def complete(
    lora: LoraConfig, weights: Mapping[str, Array], base_shapes: Mapping[str, tuple[int, ...]], *, fill: bool
) -> dict[str, Array]:
    """Check names and shapes against the base model, and that every module that the flags train is there.

    With `fill` missing modules start fresh: B is zero, so nothing changes until they are trained.
    """
    expected = _trained_modules(lora, base_shapes)
    present = {peft_layout.parse(name)[0] for name in weights}
    if strange := sorted(present - expected.keys()):
        msg = f"the base model has no module {strange[0]!r} ({len(strange)} such); is it the right one?"
        raise UserError(msg)
    for name, array in weights.items():
        module, side = peft_layout.parse(name)
        wanted = expected[module].shape(side, lora.rank)
        if array.shape != wanted:
            msg = f"tensor {name!r} has the shape {list(array.shape)}; this base model needs {list(wanted)}"
            raise UserError(msg)
    missing = sorted(expected.keys() - present)
    if missing and not fill:
        leaves = sorted({module.rpartition(".")[2] for module in missing})
        msg = (
            f"the adapter leaves out {len(missing)} modules of those that are trained together ({', '.join(leaves)}, "
            f"such as {missing[0]}); pass --fill-missing to have them start at zero effect"
        )
        raise UnsupportedError(msg)
    completed = dict(weights)
    for index, module in enumerate(missing):
        bound = expected[module].size_in ** -0.5
        rng = np.random.default_rng([lora.seed, index])
        shape_A, shape_B = (expected[module].shape(side, lora.rank) for side in SIDES)
        completed[weight_name(module, "A")] = rng.uniform(-bound, bound, shape_A).astype(np.float32)
        completed[weight_name(module, "B")] = np.zeros(shape_B, np.float32)
    return completed


def _trained_modules(lora: LoraConfig, base_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, AdaptedModule]:
    """Return every module that the flags name."""
    leaves = {*(_ATTENTION if lora.train_attn else ()), *((*_MLP, *_EXPERTS) if lora.train_mlp else ())}
    leaves |= {HEAD} if lora.train_unembed else set()
    every = adapted_modules(base_shapes)
    return {module: shape for module, shape in every.items() if module.rpartition(".")[2] in leaves}
