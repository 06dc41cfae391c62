"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without rotary embedding, an MLP, or experts.

MLPs and experts have no gates: the square of a ReLU takes their place. In larger models, routed experts read latents.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import Groups, LayerKind, Mamba, Mixture, ModelConfig, Norms, decoder, family, refuse

_LAYERS: Mapping[str, str] = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_FORMER: Mapping[str, str] = {"mamba": "linear_attention", "attention": "full_attention"}
_DEFAULTS: Mapping[str, Json] = {"head_dim": 128, "num_key_value_heads": 8, "norm_topk_prob": True}
"""What files leave out."""
_NO_LIMITS: tuple[Json, ...] = (None, [0, math.inf], [0, {"__float__": "Infinity"}])


@family("NemotronHForCausalLM")
def nemotron_h(config: Mapping[str, Json], path: Path) -> ModelConfig:
    """Time steps have no bounds, as in vLLM and Megatron; transformers trains with `time_step_min` as one."""
    refuse(
        config, path, "attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32", "sliding_window"
    )
    layers = _layers(config, path)
    for key, known in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if config.get(key, known) != known:
            msg = f"{path}: {key} is {config[key]!r}, supported is {known!r}"
            raise ConfigError(msg)
    if config.get("time_step_limit") not in _NO_LIMITS:
        msg = f"{path}: time_step_limit is {config['time_step_limit']!r}, supported are no limits, [0, Infinity]"
        raise ConfigError(msg)
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
