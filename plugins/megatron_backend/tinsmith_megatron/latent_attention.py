"""Attention by latents: Megatron's module, with linear layers, norms and rotary angles of this plugin.

It computes keys and values of all heads from the latents, as other attention would. Heads are divided over the
tensor-parallel ranks; the projections to latents are whole on each, which computes those of its part of the sequence.
"""

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

from tinsmith_checkpoints.huggingface import ATTENTION, LATENT, Rope
from tinsmith_megatron.attention import PackedAttention
from tinsmith_megatron.linears import ColumnLinear, RowLinear, WholeLinear
from tinsmith_megatron.norm import Norm
from tinsmith_megatron.rotation import PackedRotation
from tinsmith_megatron.untyped import Untyped

# Megatron makes a projection to latents of three classes that it knows by name. This one is whole on every rank.
multi_latent_attention.TELinear = WholeLinear

_LATENT_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others


class LatentNorm(Norm):
    def __init__(self, *, eps: float, **others: Untyped) -> None:
        del eps
        super().__init__(eps=_LATENT_EPS, **others)


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # Megatron has no types
    """`rope`: of the rotated part of queries and keys."""

    def __init__(self, *arguments: Untyped, rope: Rope, **named: Untyped) -> None:
        super().__init__(*arguments, **named)
        self.rotary_pos_emb = PackedRotation(rope)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Untyped]:
        """Take modules as they are given. Megatron-core 0.19 wants a norm of queries even if they have no latents."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def projections(self) -> dict[str, Untyped]:
        """Return the linear layers by the paths of their modules."""
        q, *_, o = ATTENTION
        q_a, q_b, kv_a, kv_b = LATENT
        if self.config.q_lora_rank is None:
            queries = {q: self.linear_q_proj}
        else:
            queries = {q_a: self.linear_q_down_proj, q_b: self.linear_q_up_proj}
        return {**queries, kv_a: self.linear_kv_down_proj, kv_b: self.linear_kv_up_proj, o: self.linear_proj}


SUBMODULES = MLASelfAttentionSubmodules(
    linear_q_proj=ColumnLinear,
    linear_q_down_proj=WholeLinear,
    linear_q_up_proj=ColumnLinear,
    linear_kv_down_proj=WholeLinear,
    linear_kv_up_proj=ColumnLinear,
    core_attention=PackedAttention,
    linear_proj=RowLinear,
    q_layernorm=LatentNorm,
    kv_layernorm=LatentNorm,
)
"""What `LatentAttention` is made of."""
