"""gpt-oss: sinks and windows of attention, biases everywhere, experts with a clamped activation, in MXFP4 or not."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith_checkpoints.huggingface import EXPERT_FIELDS, Json, honoured, no_meaning
from tinsmith_jax import Attention, Clamped, Mixture, ModelConfig, decoder, family, sliding_and_full
from tinsmith_jax.family_fields import BIASES, WINDOWS

_FIELDS = {
    **BIASES,
    **EXPERT_FIELDS,
    **WINDOWS,
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), honoured()),
    **dict.fromkeys(("experts_per_token", "initial_context_length"), no_meaning("repeats another field")),
    "hidden_act": no_meaning("the activation of this family is its own"),
}
_ROPE: Mapping[str, Json] = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@family("GptOssForCausalLM", fields=_FIELDS)
def gpt_oss(config: Mapping[str, Json], path: Path) -> ModelConfig:
    config = {"head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128, "norm_topk_prob": True, **config}
    if (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        config["quantization_config"] = None  # the tensors say by their names which of them are
    given = config.get("rope_parameters") or config.get("rope_scaling") or _ROPE
    rope = {"rope_theta": config.get("rope_theta", _ROPE["rope_theta"]), **given}
    config["rope_parameters"] = {"sliding_attention": rope, "full_attention": rope}
    kinds, layer_types = sliding_and_full(config, path, every=2, sliding_theta=0.0, full_theta=0.0)
    bias = bool(config.get("attention_bias", True))
    return decoder(
        config,
        path,
        kinds=kinds,
        layer_types=layer_types,
        attention=Attention(qkv_bias=bias, o_bias=bias, sinks=True),
        mixture=Mixture(router="mlp.router", bias=True, alternate=True),
        activation=Clamped(
            limit=float(config.get("swiglu_limit", 7.0)), alpha=float(config.get("swiglu_alpha", 1.702))
        ),
    )
