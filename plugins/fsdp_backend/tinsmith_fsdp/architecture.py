"""What the front must know about a base model, read from its config.json. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""transformers classes that are a chain of embedding, layers, norm and head, with nothing in between, and whose layers
name their matrices alike. A test compares each with transformers' own forward pass."""

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Static facts of a dense decoder."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # and no more than the sliding window, where there is one

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Give (in, out) of the linear modules of one layer, by path within the layer, and of the head."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
        return {**dict(zip((*ATTENTION, *MLP), shapes, strict=True)), HEAD: (hidden, self.vocab_size)}


def read_architecture(directory: Path) -> Architecture:
    """Read `directory`/config.json. Raise ConfigError where it is missing, broken or of an unsupported kind."""
    path = directory / "config.json"
    config = _read_json(path)
    name = next(iter(config.get("architectures") or ["(none named)"]))
    if name not in ARCHITECTURES:
        msg = f"{path}: architecture {name!r} is not supported by the fsdp backend, only {', '.join(ARCHITECTURES)}"
        raise ConfigError(msg)
    if config.get("quantization_config"):
        msg = f"{path}: quantization_config is not supported by the fsdp backend; give it unquantised weights"
        raise ConfigError(msg)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return Architecture(
            name=name,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            max_position=_max_position(config),
        )
    except KeyError as error:
        msg = f"{path}: {error.args[0]!r} is missing"
        raise ConfigError(msg) from error


def _max_position(config: Mapping[str, Any]) -> int:
    """Limit sequences to the sliding window: up to there it is full attention, which is what is computed."""
    longest = int(config["max_position_embeddings"])
    window = config.get("sliding_window")
    slides = config.get("use_sliding_window", config["architectures"][0] == "MistralForCausalLM")
    return min(longest, int(window)) if window and slides else longest


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
