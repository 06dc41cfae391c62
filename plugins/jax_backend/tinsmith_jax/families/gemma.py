"""Gemma, the first: Llama's layers with wide heads; norms with an offset, and scaled embeddings."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import OFF, Json, only
from tinsmith_jax import Attention, ModelConfig, Norms, decoder, family
from tinsmith_jax.family_fields import BIASES

_FIELDS = {
    **BIASES,
    "hidden_activation": only(None, "gelu_pytorch_tanh", otherwise="`hidden_act` decides, as in transformers"),
    "use_bidirectional_attention": only(*OFF, otherwise="tokens see only those before them here"),
}


@family("GemmaForCausalLM", fields=_FIELDS)
def gemma(config: Mapping[str, Json], path: Path) -> ModelConfig:
    """Published files say "gelu", and mean its approximation by tanh, as transformers takes it."""
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
