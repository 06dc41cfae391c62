"""The models that the matrix is about: names, their classes in config.json, and the settings that choose programs.

First the names in the table of tinker-cookbook 0.6.1, then further families. Classes and settings are as published with
the models; where they could not be looked up, `note` says so. Names of one class and settings share a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_LLAMA3_ROPE: Final = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}
_LONGROPE: Final = {
    "original_max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.1 * i for i in range(12)],
        "long_factor": [2.0] * 12,
        "original_max_position_embeddings": 512,
    },
}
_TIED: Final = {"tie_word_embeddings": True}
_UNTIED: Final = {"tie_word_embeddings": False}
_AS_BEFORE: Final = "class assumed, its predecessor's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One model that people ask for."""

    name: str
    class_name: str  # empty: not known
    settings: Mapping[str, Any] = field(default_factory=dict)  # besides those of every tiny model of the class
    note: str = ""


def _names(class_name: str, settings: Mapping[str, Any], *names: str, note: str = "") -> list[Name]:
    return [Name(name=name, class_name=class_name, settings=settings, note=note) for name in names]


COOKBOOK: Final[tuple[Name, ...]] = (
    *_names("LlamaForCausalLM", {**_TIED, **_LLAMA3_ROPE}, "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B"),
    *_names(
        "LlamaForCausalLM",
        {**_UNTIED, **_LLAMA3_ROPE},
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.3-70B-Instruct",
    ),
    *_names("Qwen3ForCausalLM", _TIED, "Qwen/Qwen3-4B-Instruct-2507"),
    *_names("Qwen3ForCausalLM", _UNTIED, "Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-32B"),
    *_names(
        "Qwen3MoeForCausalLM",
        _UNTIED,
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-30B-A3B-Base",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
    ),
    *_names(
        "Qwen3VLMoeForConditionalGeneration",
        _UNTIED,
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "Qwen/Qwen3-VL-235B-A22B-Instruct",
    ),
    *_names("Qwen3_5ForConditionalGeneration", _TIED, "Qwen/Qwen3.5-4B"),
    *_names(
        "Qwen3_5ForConditionalGeneration",
        _UNTIED,
        "Qwen/Qwen3.5-9B",
        "Qwen/Qwen3.5-9B-Base",
        "Qwen/Qwen3.5-27B",
        "Qwen/Qwen3.6-27B",
    ),
    *_names("Qwen3_5ForConditionalGeneration", _UNTIED, "Qwen/Qwen3.8-27B", note=_AS_BEFORE),
    *_names(
        "Qwen3_5MoeForConditionalGeneration",
        _UNTIED,
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3.5-35B-A3B-Base",
        "Qwen/Qwen3.5-397B-A17B",
        "Qwen/Qwen3.6-35B-A3B",
    ),
    *_names("GptOssForCausalLM", _UNTIED, "openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    *_names("DeepseekV3ForCausalLM", _UNTIED, "deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Base"),
    *_names(
        "DeepseekV3ForCausalLM",
        {**_UNTIED, "n_group": 1, "topk_group": 1},
        "moonshotai/Kimi-K2-Thinking",
    ),
    *_names("DeepseekV41ForCausalLM", {}, "deepseek-ai/DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4.1-Flash-1017"),
    *_names("Kimi_K25ForConditionalGeneration", _UNTIED, "moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6"),
    *_names("KimiK3ForConditionalGeneration", {}, "moonshotai/Kimi-K3.1-Pro", note=_AS_BEFORE),
    *_names("GlmMoeDsaForCausalLM", {**_UNTIED, "index_topk": 1024}, "zai-org/GLM-5.3", note=_AS_BEFORE),
    *_names("Glm5NextForConditionalGeneration", {}, "zai-org/GLM-5.3-Flash", note="class assumed"),
    *_names("NemotronHForCausalLM", _UNTIED, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    *_names(
        "NemotronHForCausalLM",
        {**_UNTIED, "moe_latent_size": 48},
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    ),
    *_names("NemotronHForCausalLM", _UNTIED, "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16", note=_AS_BEFORE),
    *_names("", {}, "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16"),
    *_names("InklingForConditionalGeneration", {}, "thinkingmachines/Inkling", "thinkingmachines/Inkling-Small"),
    *_names("", {}, "thinkingmachines/Inkling-2-Small"),
)
"""Of which tinker-cookbook knows the renderers."""

FURTHER: Final[tuple[Name, ...]] = (
    *_names("Qwen2ForCausalLM", _TIED, "Qwen2.5, up to 3B"),
    *_names("Qwen2ForCausalLM", _UNTIED, "Qwen2.5, from 7B"),
    *_names("Qwen2MoeForCausalLM", _UNTIED, "Qwen1.5-MoE, Qwen2-57B-A14B"),
    *_names("Qwen3NextForCausalLM", _UNTIED, "Qwen3-Next-80B-A3B"),
    *_names("GemmaForCausalLM", _TIED, "Gemma"),
    *_names("Gemma2ForCausalLM", _TIED, "Gemma 2"),
    *_names("Gemma3ForCausalLM", _TIED, "Gemma 3, 270M and 1B"),
    *_names("Gemma3ForConditionalGeneration", _TIED, "Gemma 3, from 4B"),
    *_names("Olmo2ForCausalLM", _UNTIED, "OLMo 2"),
    *_names("Olmo3ForCausalLM", _UNTIED, "OLMo 3"),
    *_names("SmolLM3ForCausalLM", _TIED, "SmolLM3-3B"),
    *_names("Phi3ForCausalLM", _UNTIED, "Phi-4"),
    *_names("Phi3ForCausalLM", {**_TIED, **_LONGROPE}, "Phi-4-mini"),
    *_names("GraniteForCausalLM", _TIED, "Granite 3"),
    *_names("MistralForCausalLM", _UNTIED, "Mistral 7B"),
    *_names("Mistral3ForConditionalGeneration", _UNTIED, "Mistral Small 3.1 and 3.2"),
    *_names("Cohere2ForCausalLM", _TIED, "Command R7B"),
    *_names("SeedOssForCausalLM", _UNTIED, "Seed-OSS-36B"),
)
"""Families, by the names of their models."""
