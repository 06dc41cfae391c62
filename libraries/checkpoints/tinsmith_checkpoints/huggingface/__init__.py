"""Hugging Face directories: models, adapters, tokenizers, and tiny random ones for tests. No ML framework.

The names exported here are public: plugins that read such directories may import this module in addition to `tinsmith`.
"""

from tinsmith_checkpoints.huggingface.adapter_deltas import Delta, deltas
from tinsmith_checkpoints.huggingface.config_fields import DECODER_FIELDS, check_config, check_whole, family_table
from tinsmith_checkpoints.huggingface.decoder import (
    ATTENTION,
    DELTA,
    EXPERTS,
    HEAD,
    LATENT,
    MAMBA,
    MLP,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    DecoderShape,
    ExpertShape,
    decoder_shape,
    has_experts,
)
from tinsmith_checkpoints.huggingface.family_fields import (
    DELTA_FIELDS,
    EXPERT_FIELDS,
    LATENT_FIELDS,
    NO_WINDOW_FIELDS,
)
from tinsmith_checkpoints.huggingface.fields import OFF, Field, FileFields, honoured, no_meaning, only, only_in_lists
from tinsmith_checkpoints.huggingface.fp8 import without_fp8
from tinsmith_checkpoints.huggingface.hybrid import DeltaRule, HybridShape, Mamba, delta_rule, hybrid_shape, mixers
from tinsmith_checkpoints.huggingface.int4 import without_int4
from tinsmith_checkpoints.huggingface.joined_rows import JoinedMatrix, joined_matrices
from tinsmith_checkpoints.huggingface.known_shapes import known_config
from tinsmith_checkpoints.huggingface.language_part import LANGUAGE_MODEL, decoder_names, language_config
from tinsmith_checkpoints.huggingface.latent import LatentShape, latent_shape
from tinsmith_checkpoints.huggingface.model_files import read_model_config, understood
from tinsmith_checkpoints.huggingface.outside_files import check_depth
from tinsmith_checkpoints.huggingface.peft_layout import adapter_config, draw_lora_A, weight_name
from tinsmith_checkpoints.huggingface.places import Place, weight_places
from tinsmith_checkpoints.huggingface.rope import Rope, read_rope, short_rope
from tinsmith_checkpoints.huggingface.safetensors_files import ShardWriter, StoredTensor, StoredTensors
from tinsmith_checkpoints.huggingface.sizes import WeightCounts, adapter_weights, weight_counts
from tinsmith_checkpoints.huggingface.state_files import Kind, Targets
from tinsmith_checkpoints.huggingface.stopping import StopRules, StopWatch
from tinsmith_checkpoints.huggingface.text_steps import TextSteps
from tinsmith_checkpoints.huggingface.tiny_classes import (
    TINY,
    TINY_CLASSES,
    save_as_published,
    tiny_causal_lm,
    tiny_config,
)
from tinsmith_checkpoints.huggingface.tokenizer_files import read_tokenizer, special_tokens, tokenizer_config
from tinsmith_checkpoints.huggingface.weight_files import WeightFiles
from tinsmith_checkpoints.values import Json

__all__ = [
    "ATTENTION",
    "DECODER_FIELDS",
    "DELTA",
    "DELTA_FIELDS",
    "EXPERTS",
    "EXPERT_FIELDS",
    "HEAD",
    "LANGUAGE_MODEL",
    "LATENT",
    "LATENT_FIELDS",
    "MAMBA",
    "MLP",
    "NO_WINDOW_FIELDS",
    "OFF",
    "SHARED_EXPERT",
    "SHARED_EXPERTS",
    "TINY",
    "TINY_CLASSES",
    "DecoderShape",
    "Delta",
    "DeltaRule",
    "ExpertShape",
    "Field",
    "FileFields",
    "HybridShape",
    "JoinedMatrix",
    "Json",
    "Kind",
    "LatentShape",
    "Mamba",
    "Place",
    "Rope",
    "ShardWriter",
    "StopRules",
    "StopWatch",
    "StoredTensor",
    "StoredTensors",
    "Targets",
    "TextSteps",
    "WeightCounts",
    "WeightFiles",
    "adapter_config",
    "adapter_weights",
    "check_config",
    "check_depth",
    "check_whole",
    "decoder_names",
    "decoder_shape",
    "delta_rule",
    "deltas",
    "draw_lora_A",
    "family_table",
    "has_experts",
    "honoured",
    "hybrid_shape",
    "joined_matrices",
    "known_config",
    "language_config",
    "latent_shape",
    "mixers",
    "no_meaning",
    "only",
    "only_in_lists",
    "read_model_config",
    "read_rope",
    "read_tokenizer",
    "save_as_published",
    "short_rope",
    "special_tokens",
    "tiny_causal_lm",
    "tiny_config",
    "tokenizer_config",
    "understood",
    "weight_counts",
    "weight_name",
    "weight_places",
    "without_fp8",
    "without_int4",
]
