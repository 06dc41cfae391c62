"""The facts about a base model that engine and ranks need, read from its config.json. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import DecoderShape, Json, Rope, decoder_shape, read_model_config, read_rope

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    shape: DecoderShape
    rms_norm_eps: float
    rope: Rope

    @property
    def qk_norm(self) -> bool:
        return self.shape.class_name != "LlamaForCausalLM"


def read_architecture(directory: Path) -> Architecture:
    """Read `directory`/config.json. Raise ConfigError if it is missing, broken or of an unsupported kind."""
    return architecture_of(read_model_config(directory), directory / "config.json")


def architecture_of(config: Mapping[str, Json], path: Path) -> Architecture:
    """Understand a config.json. `path` is for messages."""
    _refuse_unsupported(config, path)
    shape = decoder_shape(config, path, supported=ARCHITECTURES)
    rope = read_rope(config, shape.head_dim, str(path))
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
