"""Gemma, the first: Llama's layers with wide heads; norms with an offset, and scaled embeddings."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Attention, ModelConfig, Norms, decoder, family, refuse


@family("GemmaForCausalLM")
def gemma(config: Mapping[str, Json], path: Path) -> ModelConfig:
    """Published files say "gelu", and mean its approximation by tanh, as transformers takes it."""
    refuse(config, path, "use_bidirectional_attention")
    config = {"tie_word_embeddings": True, "head_dim": 256, **config}
    activation, bias = config.get("hidden_act", "gelu_pytorch_tanh"), bool(config.get("attention_bias"))
    return decoder(
        config,
        path,
        activation="gelu_pytorch_tanh" if activation == "gelu" else activation,
        attention=Attention(qkv_bias=bias, o_bias=bias),
        norms=Norms(offset=1.0),
        embedding_scale=float(config["hidden_size"]) ** 0.5,
    )
