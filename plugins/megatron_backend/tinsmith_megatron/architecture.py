"""The facts about a base model that engine and ranks need, read from its config.json. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import (
    DecoderShape,
    HybridShape,
    Json,
    Rope,
    decoder_shape,
    hybrid_shape,
    language_config,
    read_model_config,
    read_rope,
)

HYBRIDS = (
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3NextForCausalLM"),
)
"""They have layers with the gated delta rule, and store the weights of norms less 1."""

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *HYBRIDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    shape: DecoderShape
    rms_norm_eps: float
    rope: Rope

    @property
    def qk_norm(self) -> bool:
        return self.shape.class_name != "LlamaForCausalLM"

    @property
    def hybrid(self) -> HybridShape | None:
        return self.shape if isinstance(self.shape, HybridShape) else None


def read_architecture(directory: Path) -> Architecture:
    """Read `directory`/config.json. Raise ConfigError if it is missing, broken or of an unsupported kind."""
    return architecture_of(read_model_config(directory), directory / "config.json")


def architecture_of(config: Mapping[str, Json], path: Path) -> Architecture:
    """Understand a config.json. `path` is for messages."""
    config = language_config(config)
    _refuse_unsupported(config, path)
    is_hybrid = next(iter(config.get("architectures") or [""])) in HYBRIDS
    shape = (hybrid_shape if is_hybrid else decoder_shape)(config, path, supported=ARCHITECTURES)
    rope = read_rope(config, shape.head_dim, str(path), partial=0.25 if is_hybrid else None)
    if rope.factor != 1.0:
        msg = f"{path}: rotary embeddings with an attention factor (yarn) are not supported by the megatron backend"
        raise ConfigError(msg)
    return Architecture(shape=shape, rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)), rope=rope)


def _refuse_unsupported(config: Mapping[str, Json], path: Path) -> None:
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if config.get(key):
            msg = f"{path}: {key} = {config[key]!r} is not supported by the megatron backend"
            raise ConfigError(msg)
    if config.get("hidden_act", "silu") != "silu":
        msg = f"{path}: hidden_act {config['hidden_act']!r} is not supported, only 'silu'"
        raise ConfigError(msg)
