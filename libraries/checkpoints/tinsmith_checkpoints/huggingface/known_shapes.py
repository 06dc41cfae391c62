"""The configurations of well-known models by name, for plans about models that are not on this machine.

Sizes and types are facts from the models' published config.json.
"""

from typing import Final

from tinsmith_checkpoints.huggingface.int8 import W8A16
from tinsmith_checkpoints.values import Json

_QWEN3: Final = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "num_key_value_heads": 8, "head_dim": 128}
_LLAMA: Final = {"vocab_size": 128_256, "max_position_embeddings": 131_072, "num_key_value_heads": 8}

_EXPERTS: Final = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}

_QWEN3_5: Final = {
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_SHARED_EXPERT: Final = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_GPT_OSS: Final = {
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "quantization_config": {"quant_method": "mxfp4"},
}
_DEEPSEEK_V3: Final = {
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
_KIMI_K2: Final = {
    **_DEEPSEEK_V3,
    "vocab_size": 163_840,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_NEMOTRON_3: Final = {
    "vocab_size": 131_072,
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hybrid_override_pattern": f"MEMEM*{4 * 'EMEMEM*'}EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}

_KINDS: Final[dict[str, tuple[str, dict[str, Json]]]] = {
    "qwen3": ("Qwen3ForCausalLM", _QWEN3),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "moe": ("Qwen3MoeForCausalLM", {**_QWEN3, **_EXPERTS, "num_key_value_heads": 4}),
    "large moe": (
        "Qwen3MoeForCausalLM",
        {**_QWEN3, **_EXPERTS, "num_key_value_heads": 4, "moe_intermediate_size": 1536},
    ),
    "hybrid": ("Qwen3_5ForCausalLM", _QWEN3_5),
    "large hybrid": ("Qwen3_5ForCausalLM", {**_QWEN3_5, "linear_num_value_heads": 48}),
    "hybrid moe": (
        "Qwen3_5MoeForCausalLM",
        {**_QWEN3_5, **_SHARED_EXPERT, "num_experts": 256, "num_experts_per_tok": 8},
    ),
    "next": (
        "Qwen3NextForCausalLM",
        {**_QWEN3_5, **_SHARED_EXPERT, "vocab_size": 151_936, "num_experts": 512, "num_experts_per_tok": 10},
    ),
    "gpt-oss": ("GptOssForCausalLM", {**_GPT_OSS, "num_local_experts": 32}),
    "large gpt-oss": ("GptOssForCausalLM", {**_GPT_OSS, "num_local_experts": 128}),
    "deepseek": ("DeepseekV3ForCausalLM", _DEEPSEEK_V3),
    "kimi": ("DeepseekV3ForCausalLM", _KIMI_K2),
    "nemotron": ("NemotronHForCausalLM", _NEMOTRON_3),
}

_SIZES: Final = {  # kind, hidden, intermediate, layers, heads, tied
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, True),
    "Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, True),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, True),
    "Qwen3-8B": ("qwen3", 4096, 12_288, 36, 32, False),
    "Qwen3-14B": ("qwen3", 5120, 17_408, 40, 40, False),
    "Qwen3-32B": ("qwen3", 5120, 25_600, 64, 64, False),
    "Qwen3-30B-A3B": ("moe", 2048, 6144, 48, 32, False),
    "Qwen3-235B-A22B": ("large moe", 4096, 12_288, 94, 64, False),
    "Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, True),
    "Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, True),
    "Llama-3-8B": ("llama", 4096, 14_336, 32, 32, False),
    "Llama-3.1-8B": ("llama", 4096, 14_336, 32, 32, False),
    "Llama-3-70B": ("llama", 8192, 28_672, 80, 64, False),
    "Llama-3.1-70B": ("llama", 8192, 28_672, 80, 64, False),
    "Llama-3.3-70B": ("llama", 8192, 28_672, 80, 64, False),
    "Qwen3.5-4B": ("hybrid", 2560, 9216, 32, 16, True),
    "Qwen3.5-9B": ("hybrid", 4096, 12_288, 32, 16, False),
    "Qwen3.5-27B": ("large hybrid", 5120, 17_408, 64, 24, False),
    "Qwen3.5-35B-A3B": ("hybrid moe", 2048, 512, 40, 16, False),
    "Qwen3-Next-80B-A3B": ("next", 2048, 5120, 48, 16, False),
    "gpt-oss-20b": ("gpt-oss", 2880, 2880, 24, 64, False),
    "gpt-oss-120b": ("large gpt-oss", 2880, 2880, 36, 64, False),
    "DeepSeek-V3.1": ("deepseek", 7168, 18_432, 61, 128, False),
    "Kimi-K2": ("kimi", 7168, 18_432, 61, 64, False),
    "Nemotron-3-Nano-30B-A3B": ("nemotron", 2688, 1856, 52, 32, False),
}

_QUANTISED: Final = "-w8a16"
_ENDINGS: Final = ("", "-instruct", "-base", "-bf16")
_SHORT_CONTEXT: Final = {"Llama-3-8B": 8192, "Llama-3-70B": 8192}

KNOWN_SHAPES: Final = tuple(_SIZES)


def known_config(name: str) -> dict[str, Json] | None:
    """Return the config.json of a model, as far as its sizes go, or None if the name is not known.

    An owner in front of the name and an ending such as `-Instruct` or `-BF16` do not matter, nor does the case. The
    ending `-W8A16` means the model quantised to 8-bit integers.
    """
    wanted = name.rpartition("/")[2].partition("@")[0].lower().removeprefix("meta-").removeprefix("nvidia-")
    if wanted.endswith(_QUANTISED):
        unquantised = known_config(wanted.removesuffix(_QUANTISED))
        return None if unquantised is None else {**unquantised, "quantization_config": W8A16}
    for known, (kind, hidden, intermediate, layers, heads, tied) in _SIZES.items():
        if wanted in {f"{known}{ending}".lower() for ending in _ENDINGS}:
            class_name, common = _KINDS[kind]
            config = {
                **common,
                "dtype": "bfloat16",
                "architectures": [class_name],
                "hidden_size": hidden,
                "intermediate_size": intermediate,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "tie_word_embeddings": tied,
            }
            return {**config, "max_position_embeddings": _SHORT_CONTEXT.get(known, config["max_position_embeddings"])}
    return None
