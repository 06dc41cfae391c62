"""Tiny random models of classes of transformers, as transformers makes and writes them.

They need torch and transformers, which are imported when a model is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tinsmith_checkpoints.errors import UserError

TINY: Final[Mapping[str, Any]] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,  # far from zero, so that attention and the loss have structure
}
"""Sizes for the configuration of a tiny model."""

_WINDOW: Final = {"sliding_window": 40}  # within the sequences of tests, and within a tile
_DELTA: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "head_dim": 32,
    "initializer_range": 0.08,
}
_VISION: Final = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: Final = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_LOCAL: Final = ("sliding_attention", "full_attention")
_HYBRID: Final = ("linear_attention", "full_attention")
_BIAS: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyClass:
    """What a tiny model of a class has besides sizes, so that all that the class can do shows in its numbers."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    layers: Sequence[str] = ()  # kinds of layers, in a pattern that is repeated
    experts: str = ""  # the setting with their number, of a class that has them
    other_parts: Mapping[str, Any] = field(default_factory=dict)  # beside `text_config`, if the class sees
    as_published: Callable[[str, Any], tuple[str, Any]] | None = None
    """Makes the name and the tensor of published files of those that transformers writes, where they differ."""


def _experts_in_out(name: str, tensor: Any) -> tuple[str, Any]:
    return name, tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor


def _layers_named_as_layers(name: str, tensor: Any) -> tuple[str, Any]:
    """Transformers 5.19 writes the layers of the language part under the name of the vision tower's."""
    return name.replace("language_model.model.blocks.", "language_model.model.layers."), tensor


_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED: Final = {**_EXPERTS, "shared_expert_intermediate_size": 48}
_GEMMA3: Final = {**_WINDOW, "head_dim": 32, "query_pre_attn_scalar": 20}
_QWEN3_5: Final = TinyClass(settings=_DELTA, layers=_HYBRID)
_QWEN3_5_MOE: Final = TinyClass(settings={**_DELTA, **_SHARED}, layers=_HYBRID, experts="num_experts")
_DEEPSEEK_V3: Final = TinyClass(
    settings={
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    experts="n_routed_experts",
)

_SPARSE: Final = TinyClass(  # an indexer that chooses as many tokens as there are
    settings={**_DEEPSEEK_V3.settings, "index_topk": 256, "index_head_dim": 16, "index_n_heads": 2},
    experts=_DEEPSEEK_V3.experts,
)

TINY_CLASSES: Final[Mapping[str, TinyClass]] = {
    "LlamaForCausalLM": TinyClass(),
    "MistralForCausalLM": TinyClass(settings=_WINDOW),
    "Mistral3ForConditionalGeneration": TinyClass(
        settings={"model_type": "mistral", "head_dim": 32},
        other_parts={"vision_config": {**_VISION, "head_dim": 16}, "tie_word_embeddings": False},
    ),
    "Qwen2ForCausalLM": TinyClass(),
    "Qwen2MoeForCausalLM": TinyClass(settings=_SHARED, experts="num_experts"),
    "Qwen3ForCausalLM": TinyClass(settings={"head_dim": 32}),
    "Qwen3MoeForCausalLM": TinyClass(settings={**_EXPERTS, "head_dim": 32}, experts="num_experts"),
    "Qwen3NextForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": TinyClass(
        settings=_DELTA, layers=_HYBRID, other_parts={"vision_config": _QWEN_VISION}
    ),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": TinyClass(
        settings=_QWEN3_5_MOE.settings,
        layers=_HYBRID,
        experts="num_experts",
        other_parts={"vision_config": _QWEN_VISION},
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": TinyClass(
        settings={**_SPARSE.settings, "n_group": 1, "topk_group": 1}, experts=_SPARSE.experts
    ),
    "Kimi_K25ForConditionalGeneration": TinyClass(
        settings={**_DEEPSEEK_V3.settings, "n_group": 1, "topk_group": 1},
        experts=_DEEPSEEK_V3.experts,
        other_parts={"vision_config": {**_VISION, "patch_size": 2}, "tie_word_embeddings": False},
        as_published=_layers_named_as_layers,
    ),
    "Qwen3VLMoeForConditionalGeneration": TinyClass(
        # transformers tells by the shape of gate and up whether files have them as published: it must be no square
        settings={**_EXPERTS, "moe_intermediate_size": 24, "head_dim": 32},
        experts="num_experts",
        other_parts={"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}},
        as_published=_experts_in_out,
    ),
    "Cohere2ForCausalLM": TinyClass(settings={**_WINDOW, "logit_scale": 0.6}, layers=_LOCAL),
    "GemmaForCausalLM": TinyClass(settings={"head_dim": 32}),
    "Gemma2ForCausalLM": TinyClass(
        settings={
            **_WINDOW,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,  # caps that scores and logits come near
            "final_logit_softcapping": 3.0,
        },
        layers=_LOCAL,
    ),
    "Gemma3ForCausalLM": TinyClass(settings=_GEMMA3, layers=_LOCAL),
    "Gemma3ForConditionalGeneration": TinyClass(
        settings=_GEMMA3, layers=_LOCAL, other_parts={"vision_config": _VISION, "mm_tokens_per_image": 4}
    ),
    "GptOssForCausalLM": TinyClass(
        settings={
            **_WINDOW,
            "head_dim": 32,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,  # which some gates and ups exceed
        },
        layers=_LOCAL,
        experts="num_local_experts",
    ),
    "GraniteForCausalLM": TinyClass(
        settings={
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        }
    ),
    "NemotronHForCausalLM": TinyClass(
        settings={
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            # steps far above the bound that transformers has for them, and vLLM does not
            "time_step_floor": 0.05,
            "time_step_max": 0.5,
            "time_step_min": 1e-6,
        },
        experts="n_routed_experts",
    ),
    "Olmo2ForCausalLM": TinyClass(),
    "Olmo3ForCausalLM": TinyClass(settings=_WINDOW, layers=_LOCAL),
    "Phi3ForCausalLM": TinyClass(),
    "SeedOssForCausalLM": TinyClass(settings={"head_dim": 32}),
    "SmolLM3ForCausalLM": TinyClass(settings={"no_rope_layer_interval": 2}),
}
"""By the name in config.json: what backends have been tested with. Others can be made, from their settings alone."""


def tiny_config(
    class_name: str, settings: Mapping[str, Any] | None = None, other_parts: Mapping[str, Any] | None = None
) -> Any:
    """Return the configuration of a tiny model, of transformers' own type.

    `settings` override `TINY` and those of `TINY_CLASSES`, `other_parts` those of a class that sees. Raise UserError if
    torch or transformers is missing, or has no such class.
    """
    made = _class(class_name)
    known = TINY_CLASSES.get(class_name, TinyClass())
    given = {**TINY, **known.settings, **(settings or {})}
    if known.experts:
        given.setdefault(known.experts, 4)
    if known.layers:
        number = given["num_hidden_layers"]
        given.setdefault("layer_types", [known.layers[i % len(known.layers)] for i in range(number)])
    if "text_config" not in made.config_class.sub_configs:
        return made.config_class(**given)
    parts = {**known.other_parts, **(other_parts or {})}
    if "vision_config" in parts and "out_hidden_size" in parts["vision_config"]:
        parts["vision_config"] = {**parts["vision_config"], "out_hidden_size": given["hidden_size"]}
    return made.config_class(text_config=given, **parts)


def tiny_causal_lm(
    class_name: str,
    settings: Mapping[str, Any] | None = None,
    other_parts: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> Any:
    """Return a model of transformers with random weights, those of norms and biases included.

    Arguments and errors are those of `tiny_config`.
    """
    made, config = _class(class_name), tiny_config(class_name, settings, other_parts)
    import torch

    torch.manual_seed(seed)
    model = made(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            parameter.data += torch.empty_like(parameter).uniform_(-_BIAS, _BIAS)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.uniform_(-_BIAS, _BIAS)
    return model.eval()


def save_as_published(model: Any, directory: Path) -> None:
    """Write a model of transformers as it writes it, but for what published files of its class have otherwise."""
    model.save_pretrained(directory)
    as_published = TINY_CLASSES.get(type(model).__name__, TinyClass()).as_published
    if as_published is not None:
        from safetensors.torch import load_file, save_file

        file = directory / "model.safetensors"
        tensors = dict(as_published(name, tensor) for name, tensor in load_file(file).items())
        save_file(tensors, file, metadata={"format": "pt"})


def _class(name: str) -> Any:
    try:
        import torch
        import transformers
    except ImportError as error:
        msg = f"a tiny {name} is made by transformers with torch, and {error.name} is not installed; install it"
        raise UserError(msg) from error
    found = getattr(transformers, name, None)
    if found is None or not issubclass(found, torch.nn.Module):
        msg = f"transformers {transformers.__version__} has no class {name}; known: {', '.join(TINY_CLASSES)}"
        raise UserError(msg)
    return found
