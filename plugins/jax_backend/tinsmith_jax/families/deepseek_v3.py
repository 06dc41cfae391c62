"""DeepSeek V3 and its like: attention by latents; experts chosen by groups, and shared ones without a gate.

The first layers have a dense MLP. Kimi-K2 is such a model, and so is the language part of Kimi-K2.5. So are DeepSeek
V3.2 and GLM-5 to 5.3 in sequences that their sparse attention sees whole.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import LATENT_FIELDS, Json, honoured, no_meaning, only_in_lists, read_rope
from tinsmith_jax import Attention, Groups, Latent, LayerKind, Mixture, ModelConfig, decoder, family

_WITHIN = no_meaning("sequences are no longer than `index_topk`, within which every token sees all before it")
_FIELDS_V32 = {
    **LATENT_FIELDS,
    "mlp_layer_types": honoured(),
    "index_topk": honoured("the longest sequence"),
    **dict.fromkeys(("index_n_heads", "index_head_dim", "indexer_types"), _WITHIN),
    "layer_types": only_in_lists(
        *("indexed_attention", "full_attention"), otherwise="layers of this family see no windows here"
    ),
}


@family("DeepseekV3ForCausalLM", fields=LATENT_FIELDS)
@family("KimiK25ForConditionalGeneration", fields=LATENT_FIELDS)
@family("Kimi_K25ForConditionalGeneration", fields=LATENT_FIELDS)
def deepseek_v3(config: Mapping[str, Json], path: Path) -> ModelConfig:
    return _described(config, path)


@family("DeepseekV32ForCausalLM", fields=_FIELDS_V32)
@family("GlmMoeDsaForCausalLM", fields=_FIELDS_V32)
def deepseek_v32(config: Mapping[str, Json], path: Path) -> ModelConfig:
    """Each token attends to the `index_topk` tokens that an indexer chooses: to all, if there are no more of them."""
    layers, dense = int(config["num_hidden_layers"]), int(config.get("first_k_dense_replace", 3))
    by_layer = config.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (layers - dense)
    dense = by_layer.count("dense")
    if by_layer != ["dense"] * dense + ["sparse"] * (layers - dense):
        msg = f"{path}: mlp_layer_types is {by_layer!r}, supported are dense layers before all sparse ones"
        raise ConfigError(msg)
    return _described({**config, "first_k_dense_replace": dense}, path, longest=int(config.get("index_topk", 2048)))


def _described(config: Mapping[str, Json], path: Path, longest: int | None = None) -> ModelConfig:
    config = {"n_shared_experts": 1, "norm_topk_prob": True, **config}
    layers = int(config["num_hidden_layers"])
    dense = min(int(config.get("first_k_dense_replace", 3)), layers)
    if dense == layers:
        config = {**config, "n_routed_experts": 0}
    latent = Latent(
        query_rank=config.get("q_lora_rank", 1536),
        rank=int(config.get("kv_lora_rank", 512)),
        plain_dim=int(config.get("qk_nope_head_dim", 128)),
        rotated_dim=int(config.get("qk_rope_head_dim", 64)),
        value_dim=int(config.get("v_head_dim", 128)),
        alternate=bool(config.get("rope_interleave", True)),
    )
    rope = read_rope(config, latent.rotated_dim, str(path))
    return decoder(
        {**config, "head_dim": latent.key_dim, "num_key_value_heads": config["num_attention_heads"]},
        path,
        kinds={"all": LayerKind(rope=rope)},
        layer_types=("all",) * layers,
        attention=Attention(latent=latent, scale=_scale(config, latent.key_dim)),
        mixture=Mixture(
            groups=Groups(
                number=int(config.get("n_group") or 1),
                chosen=int(config.get("topk_group") or 1),
                scale=float(config.get("routed_scaling_factor", 2.5)),
            )
        ),
        dense_layers=dense if dense < layers else 0,
        longest=longest,
    )


def _scale(config: Mapping[str, Json], key_dim: int) -> float | None:
    """Return the scale of scores, where that of yarn is not only in the rotated part of queries and keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    all_dims = float(rope.get("mscale_all_dim") or 0)
    if not all_dims or float(rope.get("factor") or 1) <= 1:
        return None
    return float((0.1 * all_dims * math.log(float(rope["factor"])) + 1) ** 2 * key_dim**-0.5)
