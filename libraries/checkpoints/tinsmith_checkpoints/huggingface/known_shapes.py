"""The configurations of well-known models by name, for plans about models that are not on this machine.

Sizes and types are facts from the models' published config.json.
"""

from typing import Final

from tinsmith_checkpoints.huggingface.int8 import W8A16
from tinsmith_checkpoints.values import Json

_QWEN3: Final = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "num_key_value_heads": 8, "head_dim": 128}
_LLAMA: Final = {"vocab_size": 128_256, "max_position_embeddings": 131_072, "num_key_value_heads": 8}

_EXPERTS: Final = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}

_KINDS: Final[dict[str, tuple[str, dict[str, Json]]]] = {
    "qwen3": ("Qwen3ForCausalLM", _QWEN3),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "moe": ("Qwen3MoeForCausalLM", {**_QWEN3, **_EXPERTS, "num_key_value_heads": 4}),
    "large moe": (
        "Qwen3MoeForCausalLM",
        {**_QWEN3, **_EXPERTS, "num_key_value_heads": 4, "moe_intermediate_size": 1536},
    ),
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
}

_QUANTISED: Final = "-w8a16"
_SHORT_CONTEXT: Final = {"Llama-3-8B": 8192, "Llama-3-70B": 8192}

KNOWN_SHAPES: Final = tuple(_SIZES)


def known_config(name: str) -> dict[str, Json] | None:
    """Return the config.json of a model, as far as its sizes go, or None if the name is not known.

    An owner in front of the name and an ending such as `-Instruct` do not matter, nor does the case. The ending
    `-W8A16` means the model quantised to 8-bit integers.
    """
    wanted = name.rpartition("/")[2].partition("@")[0].lower().removeprefix("meta-")
    if wanted.endswith(_QUANTISED):
        unquantised = known_config(wanted.removesuffix(_QUANTISED))
        return None if unquantised is None else {**unquantised, "quantization_config": W8A16}
    for known, (kind, hidden, intermediate, layers, heads, tied) in _SIZES.items():
        if wanted in {known.lower(), f"{known}-instruct".lower(), f"{known}-base".lower()}:
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
