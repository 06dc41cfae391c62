"""The fields of config.json that families share, beyond those of all decoders, as backends compute them."""

from collections.abc import Mapping
from typing import Final

from tinsmith_checkpoints.huggingface.fields import OFF, Field, honoured, no_meaning, only, only_in_lists

_SEE_ALL: Final = "layers of this family see all tokens before them here"
_ALL_EXPERTS: Final = "all layers of this family have experts here"
_OF_LATENTS: Final = no_meaning("keys and values are products of a latent, whose own fields decide")
_OF_LOSSES: Final = no_meaning("of a loss that training here does not have")

NO_WINDOW_FIELDS: Final[Mapping[str, Field]] = {
    "use_sliding_window": only(*OFF, otherwise=_SEE_ALL),
    "layer_types": only_in_lists("full_attention", otherwise=_SEE_ALL),
    **dict.fromkeys(("sliding_window", "max_window_layers"), no_meaning("belongs to `use_sliding_window`")),
}
"""Of families whose windows no backend computes."""

EXPERT_FIELDS: Final[Mapping[str, Field]] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), honoured()),
    **dict.fromkeys(("norm_topk_prob", "shared_expert_intermediate_size"), honoured()),
    "decoder_sparse_step": only(1, None, otherwise=_ALL_EXPERTS),
    "mlp_only_layers": only([], None, otherwise=_ALL_EXPERTS),
    "output_router_logits": no_meaning("what transformers returns"),
    "router_aux_loss_coef": _OF_LOSSES,
}
"""Of families whose layers all have experts."""

DELTA_FIELDS: Final[Mapping[str, Field]] = dict.fromkeys(
    (
        *("layer_types", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
    ),
    honoured(),
)
"""Of families with the gated delta rule."""

LATENT_FIELDS: Final[Mapping[str, Field]] = {
    **dict.fromkeys(
        (
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave"),
            *("n_routed_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor"),
            "first_k_dense_replace",
        ),
        honoured(),
    ),
    "attention_bias": only(*OFF, otherwise="attention by latents has no biases here"),
    "mlp_bias": only(*OFF, otherwise="MLPs of this family have no biases here"),
    "scoring_func": only("sigmoid", None, otherwise="experts are chosen by sigmoid here"),
    "topk_method": only("noaux_tc", None, otherwise="experts are chosen with a correction, without a loss, here"),
    "moe_layer_freq": only(1, None, otherwise="all layers behind the first ones have experts here"),
    **dict.fromkeys(("head_dim", "num_key_value_heads", "qk_head_dim"), _OF_LATENTS),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), no_meaning("of layers that guess further tokens")),
    "output_router_logits": no_meaning("what transformers returns"),
    **dict.fromkeys(("aux_loss_alpha", "seq_aux", "router_aux_loss_coef"), _OF_LOSSES),
    "ep_size": no_meaning("how the layers are divided over devices"),
}
"""Of families that attend by latents."""
