"""OLMo 2 and 3: norms after attention and MLP, and of queries and keys of all heads together.

Most layers of OLMo 3 see a window.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Attention, ModelConfig, Norms, decoder, family, sliding_and_full
from tinsmith_jax.family_fields import BIASES, WINDOWS


@family("Olmo3ForCausalLM", fields={**BIASES, **WINDOWS})
def olmo3(config: Mapping[str, Json], path: Path) -> ModelConfig:
    theta = config.get("rope_theta", 500_000.0)
    kinds, layer_types = sliding_and_full(config, path, every=4, sliding_theta=theta, full_theta=theta)
    return _olmo(config, path, kinds=kinds, layer_types=layer_types)


@family("Olmo2ForCausalLM", fields=BIASES)
def olmo2(config: Mapping[str, Json], path: Path) -> ModelConfig:
    return _olmo(config, path)


def _olmo(config: Mapping[str, Json], path: Path, **kinds: Any) -> ModelConfig:
    bias = bool(config.get("attention_bias"))
    return decoder(
        {"rms_norm_eps": 1e-5, **config},
        path,
        **kinds,
        attention=Attention(qkv_bias=bias, o_bias=bias, qk_norm="whole"),
        norms=Norms(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
    )
