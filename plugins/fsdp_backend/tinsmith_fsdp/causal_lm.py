"""A model of transformers without its weights: built on the meta device, and what of it must be a number all the same.

Buffers, such as the scale of an embedding, are in no file: transformers computes them when it initialises a module.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import joined_matrices
from tinsmith_fsdp import attention, experts
from tinsmith_fsdp.gated_delta import PackedGatedDelta, is_gated_delta

Buffer = tuple[nn.Module, str, torch.Tensor]
_PARTS: Final = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")


def read_config(directory: Path) -> Any:
    """Read config.json as transformers does. Of a model that also sees or hears, return the language part's."""
    whole = transformers.AutoConfig.from_pretrained(directory)
    config = whole.get_text_config()
    if config is not whole:
        config.tie_word_embeddings = whole.tie_word_embeddings
    return config


def class_of(name: str, config: Any) -> Any:
    """Return transformers' class of that name, or of the language part of one that also sees or hears.

    `config`: as `read_config` returns it. Raise ConfigError if the installed version has none, or it is of another one.
    """
    named = getattr(transformers, name, None)
    if named is None:
        msg = (
            f"transformers {transformers.__version__} has no class {name}; use another version of it, or another model"
        )
        raise ConfigError(msg)
    if type(config) is named.config_class:
        return named
    part = named.config_class.sub_configs.get("text_config")
    found = (
        MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) if part in (type(config), transformers.AutoConfig) else None
    )
    if found is None:
        msg = f"config.json says that the model is a {name}, and its model_type is another's: {config.model_type}"
        raise ConfigError(msg)
    return found


def require_parts(causal_lm: nn.Module) -> None:
    """Raise ConfigError if the model is not embedding, layers, norm and head, by the names that nearly all have."""
    modules = dict(causal_lm.named_modules())
    if missing := [part for part in _PARTS if part not in modules]:
        msg = (
            f"{type(causal_lm).__name__} is built in another way than the fsdp backend can train: it has no "
            f"{', '.join(missing)}"
        )
        raise ConfigError(msg)


def mix_packed(causal_lm: nn.Module) -> None:
    """Have the model's layers call our attention, our gated delta rule, and our experts if it has any."""
    attention.register()
    experts.register()
    causal_lm.config._attn_implementation = attention.NAME  # type: ignore[union-attr]  # noqa: SLF001  (where they look)
    causal_lm.config._experts_implementation = experts.NAME  # type: ignore[union-attr]  # noqa: SLF001  (as above)
    joined = joined_matrices({**causal_lm.config.to_dict(), "architectures": [type(causal_lm).__name__]})  # type: ignore[operator, union-attr]
    for layer in causal_lm.model.layers:  # type: ignore[union-attr]  # a ModuleList
        for name, module in list(layer.named_children()):
            if is_gated_delta(module):
                own = [matrix for matrix in joined if matrix.path.startswith(f"{name}.")]
                setattr(layer, name, PackedGatedDelta(module, own))


def stored_buffers(causal_lm: nn.Module) -> list[str]:
    """Name the buffers that are in a model's files, such as the correction of a router's choice."""
    buffers = {name for name, _ in causal_lm.named_buffers()}
    return [name for name in causal_lm.state_dict() if name in buffers]


def computed_buffers(causal_lm: nn.Module, device: torch.device) -> dict[str, Buffer]:
    """Compute the buffers of a model on the meta device, by their names. Nothing of the model changes.

    Raise ConfigError if transformers does not say how one is computed.
    """
    found = {}
    for name, module in causal_lm.named_modules():
        on_meta = {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if on_meta:
            for key, buffer in _computed(causal_lm, module, on_meta, device).items():
                if buffer.is_floating_point() and buffer.isnan().any():
                    msg = f"transformers does not say how {type(causal_lm).__name__} computes {name}.{key}"
                    raise ConfigError(msg)
                found[f"{name}.{key}"] = module, key, buffer
    return found


def _computed(
    causal_lm: nn.Module, module: nn.Module, buffers: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Have transformers initialise a module whose weights are of one number each: theirs would take long."""
    held = dict(module._parameters)  # noqa: SLF001 - torch has no public way to exchange them
    for key, buffer in buffers.items():
        module._buffers[key] = torch.full(buffer.shape, torch.nan, device=device).to(buffer.dtype)  # noqa: SLF001
    for key, parameter in held.items():
        module._parameters[key] = None if parameter is None else nn.Parameter(torch.zeros([1] * parameter.ndim))  # noqa: SLF001
    causal_lm._init_weights(module)  # type: ignore[operator]  # noqa: SLF001 - as above
    found = {key: module._buffers[key] for key in buffers}  # noqa: SLF001
    module._parameters.update(held)  # noqa: SLF001
    module._buffers.update(buffers)  # noqa: SLF001
    return {key: buffer for key, buffer in found.items() if buffer is not None}
