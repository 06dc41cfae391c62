"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without rotary embedding, an MLP, or experts.

MLPs and experts have no gates: the square of a ReLU takes their place. In larger models, routed experts read latents.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import OFF, Json, honoured, no_meaning, only
from tinsmith_jax import Groups, LayerKind, Mamba, Mixture, ModelConfig, Norms, decoder, family

_LAYERS: Mapping[str, str] = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_FORMER: Mapping[str, str] = {"mamba": "linear_attention", "attention": "full_attention"}
_DEFAULTS: Mapping[str, Json] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
}
"""What files leave out."""
_NO_BIAS = only(*OFF, otherwise="these matrices have no biases here")
_NO_POSITIONS = no_meaning("positions are not encoded")
_OF_FUTURE_TOKENS = no_meaning("of layers that guess further tokens")
_FIELDS = {
    **dict.fromkeys(
        (
            *("layers_block_type", "layer_types", "hybrid_override_pattern", "n_groups", "mamba_num_heads"),
            *("mamba_head_dim", "ssm_state_size", "conv_kernel", "use_conv_bias", "layer_norm_epsilon", "norm_eps"),
            *("n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("moe_latent_size", "moe_shared_expert_intermediate_size", "norm_topk_prob", "n_group", "topk_group"),
            "routed_scaling_factor",
        ),
        honoured(),
    ),
    "n_shared_experts": only(1, None, otherwise="one expert computes every token here"),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), _NO_BIAS),
    "residual_in_fp32": only(*OFF, otherwise="residuals have the type of the weights here"),
    "sliding_window": only(None, 0, otherwise="layers of this family see all tokens before them here"),
    "mlp_hidden_act": only("relu2", None, otherwise="MLPs of this family square a ReLU here"),
    "mamba_hidden_act": only("silu", None, otherwise="Mamba layers of this family have SiLU here"),
    "time_step_limit": only(
        *(None, [0, math.inf], [0, {"__float__": "Infinity"}]), otherwise="time steps have no limits here"
    ),
    "hidden_act": no_meaning("`mlp_hidden_act` and `mamba_hidden_act` decide"),
    "num_hidden_layers": no_meaning("`layers_block_type` has a name for each layer"),
    "rms_norm_eps": no_meaning("`layer_norm_epsilon` decides"),
    **dict.fromkeys(("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor"), _NO_POSITIONS),
    "hidden_dropout": no_meaning("acts in the training of the base model alone"),
    **dict.fromkeys(
        ("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "mamba_dt_init"),
        no_meaning("how weights are initialised; vLLM and Megatron do not bound time steps with them, either"),
    ),
    **dict.fromkeys(
        ("chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "moe_shared_expert_overlap"),
        no_meaning("how the layers are computed"),
    ),
    "expand": no_meaning("`mamba_num_heads` and `mamba_head_dim` decide"),
    "output_router_logits": no_meaning("what transformers returns"),
    **dict.fromkeys(
        ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"), _OF_FUTURE_TOKENS
    ),
}


@family("NemotronHForCausalLM", fields=_FIELDS)
def nemotron_h(config: Mapping[str, Json], path: Path) -> ModelConfig:
    """Time steps have no bounds, as in vLLM and Megatron; transformers trains with `time_step_min` as one."""
    layers = _layers(config, path)
    if "moe" not in layers:
        config = {**config, "n_routed_experts": 0}
    elif "mlp" in layers:
        msg = f"{path}: layers with a dense MLP beside layers with experts are not supported"
        raise ConfigError(msg)
    mamba = Mamba(
        key_heads=int(config.get("n_groups", 8)),
        value_heads=int(config.get("mamba_num_heads", 128)),
        key_dim=int(config.get("ssm_state_size", 128)),
        value_dim=int(config.get("mamba_head_dim", 64)),
        width=int(config.get("conv_kernel", 4)),
        conv_bias=bool(config.get("use_conv_bias", True)),
    )
    eps = config.get("layer_norm_epsilon", config.get("norm_eps", 1e-5))
    return decoder(
        {**_DEFAULTS, **config, "num_hidden_layers": len(layers), "rms_norm_eps": eps},
        path,
        kinds={
            "linear_attention": LayerKind(mamba=mamba, mlp=False),
            "full_attention": LayerKind(rope=None, mlp=False),
            "mlp": LayerKind(mixer=False),
            "moe": LayerKind(mixer=False),
        },
        layer_types=layers,
        activation="relu2",
        gated=False,
        norms=Norms(before_attention="norm", before_mlp="norm"),
        mixture=Mixture(
            groups=Groups(
                number=int(config.get("n_group") or 1),
                chosen=int(config.get("topk_group") or 1),
                scale=float(config.get("routed_scaling_factor", 1.0)),
            )
        ),
        renamed=tuple((ours, "mixer") for ours in ("self_attn", "mamba", "mlp")),
    )


def _layers(config: Mapping[str, Json], path: Path) -> tuple[str, ...]:
    """Return what each layer is: files have a letter or a name for each."""
    given = config.get("layers_block_type") or config.get("layer_types")
    found = [_LAYERS.get(each, each) for each in config.get("hybrid_override_pattern") or ()]
    found = [_FORMER.get(each, each) for each in given or found]
    if not found or not set(found) <= set(_LAYERS.values()):
        msg = f"{path}: layers_block_type must name one of {', '.join(_LAYERS.values())} for each layer"
        raise ConfigError(msg)
    return tuple(found)
