"""PEFT's layout of the adapters of experts, from ours, which is Tinker's.

transformers joins the experts of a layer in two parameters, gate_up_proj [E, 2 I, H] and down_proj [E, H, I], and PEFT
gives each expert an A and a B of its own. So what our experts share is repeated, and gate and up, which have an A each,
become one adapter of twice the rank. Experts without gates have up_proj in place of the first. In gpt-oss, the outputs
of gate and up alternate. Likewise, where a base model joins the rows of several modules in one matrix, their adapters
become one. The layers of a model that also sees are those of its language part.

Legend: E = experts, I = inner size of an expert, H = hidden, r = rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tinsmith_checkpoints.errors import UserError
from tinsmith_checkpoints.huggingface import peft_layout
from tinsmith_checkpoints.huggingface.decoder import EXPERTS, MLP
from tinsmith_checkpoints.huggingface.joined_rows import JoinedMatrix, joined_matrices
from tinsmith_checkpoints.huggingface.language_part import LANGUAGE_MODEL
from tinsmith_checkpoints.huggingface.model_files import read_model_config
from tinsmith_checkpoints.values import Array, LoraConfig

_GATE, _UP, _DOWN = (path.rpartition(".")[2] for path in EXPERTS)
_SUFFIXES: Final = (".mlp.experts", ".mixer.experts")
_LEAVES: Final = tuple(f".{path.rpartition('.')[2]}" for path in MLP)
_GATED: Final = "gate_up_proj"


def to_peft(base_model: str, lora: LoraConfig, weights: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the weights and the adapter_config.json that PEFT loads. Any: JSON.

    Raise UserError if it cannot be told how the base model lays out its experts.
    """
    base = read_model_config(Path(base_model)) if Path(base_model, "config.json").is_file() else {}
    weights, joined = _with_joined_rows(joined_matrices(base), lora, weights)
    experts = sorted({module for name in weights if (module := _experts_of(name)) is not None})
    renamed = {name: array for name, array in weights.items() if _experts_of(name) is None}
    config = peft_layout.adapter_config(base_model, lora, renamed)
    for path, times in joined.items():
        config["rank_pattern"][path] = times * lora.rank
        config["alpha_pattern"][path] = times * config["lora_alpha"]
    alternate = bool(experts) and _alternate(base_model)
    for module in experts:
        renamed |= _joined(module, lora.rank, weights, alternate=alternate)
    if experts:
        path = experts[0].partition(".layers.")[2].partition(".")[2]
        gated = peft_layout.weight_name(f"{experts[0]}.{_GATE}", "A") in weights
        config["target_parameters"] = [f"{path}.{_GATED if gated else 'up_proj'}", f"{path}.down_proj"]
        if gated:
            config["rank_pattern"][f"{path}.{_GATED}"] = 2 * lora.rank
            config["alpha_pattern"][f"{path}.{_GATED}"] = 2 * config["lora_alpha"]
    if "text_config" in base:
        renamed = {_in_language_part(name): array for name, array in renamed.items()}
        config["target_modules"] = sorted({peft_layout.parse(name)[0] for name in renamed if not _experts_of(name)})
    if experts:
        _take_dense(config, {peft_layout.parse(name)[0] for name in renamed})
    return renamed, config


def _take_dense(config: dict[str, Any], modules: Iterable[str]) -> None:
    """Name the matrices of dense MLPs beside experts as parameters.

    As modules, PEFT takes each `gate_proj`, `up_proj` and `down_proj` for experts', and leaves out the others.
    """
    dense = {module.partition(".layers.")[2].partition(".")[2] for module in modules if module.endswith(_LEAVES)}
    config["target_parameters"] += sorted(f"{path}.weight" for path in dense)
    config["target_modules"] = [name for name in config["target_modules"] if not f".{name}".endswith(_LEAVES)]


def _in_language_part(name: str) -> str:
    return name.replace("base_model.model.model.", f"base_model.model.{LANGUAGE_MODEL}", 1)


def _with_joined_rows(
    matrices: Sequence[JoinedMatrix], lora: LoraConfig, weights: Mapping[str, Array]
) -> tuple[Mapping[str, Array], dict[str, int]]:
    """Make one adapter of those of modules whose rows the base model joins, of as many times the rank as there are.

    Return the weights, and how many times for each such matrix, by its last name.
    """
    found, times = dict(weights), dict[str, int]()
    for matrix in matrices:
        first = f".{matrix.modules[0]}"
        for name in weights:
            module, side = peft_layout.parse(name)
            if side == "A" and module.endswith(first):
                layer = module.removesuffix(first)
                pairs = [
                    tuple(found.pop(peft_layout.weight_name(f"{layer}.{each}", s)) for s in peft_layout.SIDES)
                    for each in matrix.modules
                ]
                B = np.zeros((matrix.num_rows, lora.rank * len(pairs)), np.float32)
                for i, (each, (_, own)) in enumerate(zip(matrix.modules, pairs, strict=True)):
                    B[matrix.rows_of(each), i * lora.rank : (i + 1) * lora.rank] = own
                joined = f"{layer}.{matrix.path}"
                found[peft_layout.weight_name(joined, "A")] = np.concatenate([A for A, _ in pairs])
                found[peft_layout.weight_name(joined, "B")] = B
                times[matrix.path.rpartition(".")[2]] = len(pairs)
    return found, times


def _alternate(base_model: str) -> bool:
    """Return whether gate and up of a base model, named or in a directory, alternate."""
    if Path(base_model, "config.json").is_file():
        return "GptOssForCausalLM" in (read_model_config(Path(base_model)).get("architectures") or ())
    name = base_model.lower()
    if not any(known in name for known in ("gpt-oss", "qwen", "deepseek", "kimi", "nemotron")):
        msg = (
            f"the name of the base model {base_model!r} does not say how its experts are laid out; pass --base-model "
            "with the directory that has its config.json"
        )
        raise UserError(msg)
    return "gpt-oss" in name


def _experts_of(name: str) -> str | None:
    """Return the module of a layer's experts to whose adapters this weight belongs."""
    module = peft_layout.parse(name)[0].rpartition(".")[0]
    return module if module.endswith(_SUFFIXES) else None


def _joined(module: str, rank: int, weights: Mapping[str, Array], *, alternate: bool) -> dict[str, Array]:
    A_up, B_up, A_down, B_down = (
        weights[peft_layout.weight_name(f"{module}.{name}", side)]
        for name in (_UP, _DOWN)
        for side in peft_layout.SIDES
    )
    num_experts, inner = B_up.shape[:2]
    names = [peft_layout.weight_name(f"{module}.{_GATE}", side) for side in peft_layout.SIDES]
    if names[0] not in weights:
        return {
            **_of_parameter(f"{module}.base_layer", A_up, B_up, num_experts),
            **_of_parameter(module, A_down, B_down, num_experts),
        }
    A_gate, B_gate = (weights[name] for name in names)
    A_both = np.concatenate((A_gate, A_up), axis=1)
    B_both = np.zeros((num_experts, 2 * inner, 2 * rank), np.float32)
    gate, up = (slice(0, None, 2), slice(1, None, 2)) if alternate else (slice(inner), slice(inner, None))
    B_both[:, gate, :rank] = B_gate
    B_both[:, up, rank:] = B_up
    return {
        **_of_parameter(f"{module}.base_layer", A_both, B_both, num_experts),  # PEFT wraps the first parameter first
        **_of_parameter(module, A_down, B_down, num_experts),
    }


def _of_parameter(module: str, A: Array, B: Array, num_experts: int) -> dict[str, Array]:
    """Lay out A [E or 1, r, in] as [E r, in] and B [E or 1, out, r] as [out, r E]."""
    A, B = (np.broadcast_to(factor, (num_experts, *factor.shape[1:])) for factor in (A, B))
    return {
        peft_layout.weight_name(module, "A"): np.ascontiguousarray(A.reshape(-1, A.shape[-1])),
        peft_layout.weight_name(module, "B"): np.ascontiguousarray(B.transpose(1, 2, 0).reshape(B.shape[1], -1)),
    }
