"""The models that are measured: random weights, so that anyone can make them.

They are of bfloat16, as published checkpoints are.
"""

from typing import Final

from tinsmith_checkpoints.huggingface.tiny_model import TinyShape

SHAPES: Final = {
    # 4.2 million parameters
    "tiny": TinyShape(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_heads=8, num_kv_heads=4, dtype="bfloat16"
    ),
    # 4.5 million: three layers with the gated delta rule to one that attends, as in Qwen3.5
    "hybrid": TinyShape(
        family="Qwen3_5ForConditionalGeneration",
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_heads=8,
        num_kv_heads=4,
        max_context_tokens=8192,
        dtype="bfloat16",
        settings={
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    # 29 million
    "small": TinyShape(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        dtype="bfloat16",
    ),
    # 120 million
    "medium": TinyShape(
        vocab_size=8192,
        hidden_size=896,
        intermediate_size=2688,
        num_layers=12,
        num_heads=14,
        num_kv_heads=7,
        head_dim=64,
        dtype="bfloat16",
    ),
    # 457 million: Qwen3-0.6B with a smaller vocabulary
    "large": TinyShape(
        vocab_size=16_384,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_context_tokens=40_960,
        dtype="bfloat16",
    ),
}
