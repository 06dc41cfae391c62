"""A model and limits for which the jax backend compiles little.

All tests of a process that use both share the compiled programs. The module does not import jax, because tests of
servers use it, too.
"""

from tinsmith.huggingface.tiny_model import TinyShape

SHAPE = TinyShape(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
FEW_PROGRAMS = {"max_context_tokens": 128, "max_batch_tokens": 128, "max_lora_rank": 8, "decode_slots": 4}
