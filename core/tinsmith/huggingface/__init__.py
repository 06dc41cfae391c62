"""Hugging Face directories: models, adapters, tokenizers, and tiny random ones for tests. No ML framework.

The names exported here are public: plugins that read such directories may import this module besides `tinsmith`.
"""

from tinsmith.huggingface.decoder import ATTENTION, EXPERTS, HEAD, MLP, DecoderShape, ExpertShape, decoder_shape
from tinsmith.huggingface.model_files import read_model_config
from tinsmith.huggingface.peft_layout import adapter_config, draw_lora_A, weight_name
from tinsmith.huggingface.rope import Rope, read_rope
from tinsmith.huggingface.safetensors_files import StoredTensor, StoredTensors
from tinsmith.huggingface.state_files import Kind, Targets
from tinsmith.huggingface.weight_files import WeightFiles

__all__ = [
    "ATTENTION",
    "EXPERTS",
    "HEAD",
    "MLP",
    "DecoderShape",
    "ExpertShape",
    "Kind",
    "Rope",
    "StoredTensor",
    "StoredTensors",
    "Targets",
    "WeightFiles",
    "adapter_config",
    "decoder_shape",
    "draw_lora_A",
    "read_model_config",
    "read_rope",
    "weight_name",
]
