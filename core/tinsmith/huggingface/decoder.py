"""The shape of a dense decoder, from its config.json, and the linear modules that a LoRA adapter may train."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinsmith.errors import ConfigError

ATTENTION: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
HEAD: Final = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a dense decoder. Hashable."""

    class_name: str  # in transformers, for example Qwen3ForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    tied: bool  # the output head is the embedding

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (in, out) of each linear module of a layer, keyed by its path within the layer, and of the head."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes = [(hidden, self.q_size), (hidden, self.kv_size), (hidden, self.kv_size), (self.q_size, hidden)]
        shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
        return {**dict(zip((*ATTENTION, *MLP), shapes, strict=True)), HEAD: (hidden, self.vocab_size)}


def decoder_shape(config: Mapping[str, Any], path: Path, *, supported: Collection[str]) -> DecoderShape:  # Any: JSON
    """Read the sizes from a parsed config.json. `path` names the file in errors.

    Raise ConfigError if the architecture is not among the supported ones, or if a size is missing.
    """
    class_name = next(iter(config.get("architectures") or ["(none named)"]))
    if class_name not in supported:
        msg = f"{path}: architecture {class_name!r} is not supported, only {', '.join(supported)}"
        raise ConfigError(msg)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return DecoderShape(
            class_name=class_name,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            max_position=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        msg = f"{path}: {error.args[0]!r} is missing"
        raise ConfigError(msg) from error
