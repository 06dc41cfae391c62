"""The architecture of a base model, read from the config.json of a Hugging Face directory. No jax."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigError
from tinsmith_jax.rope import Rope, read_rope

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Static facts of a dense decoder; hashable, so that compiled functions may close over it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: Rope
    tied: bool  # the head is the embedding
    qk_norm: bool  # Qwen3

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json. Raise ConfigError where it is missing, broken or of an unsupported kind."""
    path = directory / "config.json"
    config = _read_json(path)
    architecture = next(iter(config.get("architectures") or ["(none named)"]))
    if architecture not in ARCHITECTURES:
        msg = f"{path}: architecture {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}"
        raise ConfigError(msg)
    _refuse_unsupported(config, path)
    try:
        hidden_size, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden_size // num_heads)
        return ModelConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position=int(config["max_position_embeddings"]),
            rope=read_rope(config, head_dim, str(path)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
        )
    except KeyError as error:
        msg = f"{path}: {error.args[0]!r} is missing"
        raise ConfigError(msg) from error


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if config.get(key):
            msg = f"{path}: {key} = {config[key]!r} is not supported by the jax backend"
            raise ConfigError(msg)
    if config.get("hidden_act", "silu") != "silu":
        msg = f"{path}: hidden_act {config['hidden_act']!r} is not supported, only 'silu'"
        raise ConfigError(msg)


def _read_json(path: Path) -> dict[str, Any]:  # Any: parsed JSON
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"no file {str(path)!r}: is it a Hugging Face model directory?"
        raise ConfigError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{str(path)!r} cannot be read as JSON: {error}"
        raise ConfigError(msg) from error
    if not isinstance(parsed, dict):
        msg = f"{str(path)!r} does not hold a JSON object"
        raise ConfigError(msg)
    return parsed
