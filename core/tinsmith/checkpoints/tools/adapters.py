"""Turn a PEFT adapter from anywhere into one of ours; name everything that does not fit."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tinsmith.checkpoints.tools.contents import Contents
from tinsmith.errors import ServerError, UnsupportedError, UserError
from tinsmith.huggingface import peft_layout
from tinsmith.huggingface.decoder import HEAD
from tinsmith.huggingface.peft_layout import TINKER_HEAD, rename_module, weight_name
from tinsmith.operations import Array, LoraConfig

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_UNSUPPORTED: Final = {
    "use_dora": "its magnitudes have no place in a LoRA adapter, merge it instead",
    "rank_pattern": "every module has the same rank here",
    "alpha_pattern": "every module has the same alpha here",
    "modules_to_save": "whole modules beside an adapter are not trained",
    "fan_in_fan_out": "weights are [out, in] here",
    "trainable_token_indices": "there is no counterpart here",
    "target_parameters": "there is no counterpart here",
    "layer_replication": "there is no counterpart here",
    "lora_bias": "biases are not trained",
}
_SEED: Final = 0  # of what is imported; nothing is drawn from it but missing modules


def adapter_of(contents: Contents) -> tuple[LoraConfig, dict[str, Array]]:
    """Return LoRA settings and float32 weights. Raise UnsupportedError naming everything that does not fit.

    Modules may be missing; `complete` checks that there are enough to train.
    """
    if contents.manifest is not None:
        return contents.manifest.lora, {name: contents.weights[name] for name in contents.weights}
    config = contents.adapter_config
    problems = list(_problems(config))
    modules: dict[str, set[str]] = {}
    stored = {rename_module(name, TINKER_HEAD, HEAD): name for name in contents.weights}
    for name, stored_name in stored.items():
        try:
            module, side = peft_layout.parse(name)
        except ServerError as error:
            problems.append(str(error))
            continue
        leaf = module.rpartition(".")[2]
        if leaf not in (*_ATTENTION, *_MLP, HEAD):
            allowed = ", ".join((*_ATTENTION, *_MLP, HEAD))
            problems.append(f"module {module!r} is not one that is trained here ({allowed})")
        modules.setdefault(module, set()).add(side)
        rank = contents.weights.stored[stored_name].shape[0 if side == "A" else -1]
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
        alpha=float(config["lora_alpha"]),
        train_attn=not leaves.isdisjoint(_ATTENTION),
        train_mlp=not leaves.isdisjoint(_MLP),
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
        out_features, in_features = expected[module]
        wanted = (lora.rank, in_features) if side == "A" else (out_features, lora.rank)
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
        out_features, in_features = expected[module]
        bound = in_features**-0.5
        rng = np.random.default_rng([lora.seed, index])
        a = rng.uniform(-bound, bound, (lora.rank, in_features)).astype(np.float32)
        completed[weight_name(module, "A")] = a
        completed[weight_name(module, "B")] = np.zeros((out_features, lora.rank), np.float32)
    return completed


def _trained_modules(lora: LoraConfig, base_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return [out, in] of every module that the flags name."""
    leaves = {*(_ATTENTION if lora.train_attn else ()), *(_MLP if lora.train_mlp else ())}
    found = {
        name.removesuffix(".weight"): shape
        for name, shape in base_shapes.items()
        if name.endswith(".weight") and name.removesuffix(".weight").rpartition(".")[2] in leaves
    }
    if lora.train_unembed:
        head = base_shapes.get("lm_head.weight") or base_shapes.get("model.embed_tokens.weight")
        if head is not None:
            found[HEAD] = head
    return found


def _problems(config: Mapping[str, Any]) -> Iterator[str]:  # Any: JSON
    if config.get("peft_type") != "LORA":
        yield f"peft_type is {config.get('peft_type')!r}, only 'LORA' is trained here"
    yield from _scale_problems(config.get("r"), config.get("lora_alpha"), use_rslora=bool(config.get("use_rslora")))
    for key, remedy in _UNSUPPORTED.items():
        if config.get(key):
            yield f"{key} is {config[key]!r}: {remedy}"
    if config.get("bias", "none") != "none":
        yield f"bias is {config['bias']!r}: biases are not trained"


def _scale_problems(rank: object, alpha: object, *, use_rslora: bool) -> Iterator[str]:
    whole = isinstance(rank, int) and not isinstance(rank, bool) and rank > 0
    if not whole:
        yield f"r is {rank!r}; it must be a positive whole number"
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha) or alpha <= 0:
        yield f"lora_alpha is {alpha!r}; it must be a positive number"
    elif use_rslora and isinstance(rank, int) and whole:
        yield f"use_rslora is set; the same adapter without it has lora_alpha {alpha * math.sqrt(rank):.17g}"
