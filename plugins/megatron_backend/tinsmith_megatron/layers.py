"""The layers of a stage: Megatron's configuration of the model, and its specification of each layer.

Linear layers, norms, attention and experts are this plugin's.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from tinsmith_megatron.architecture import Architecture
from tinsmith_megatron.attention import PackedAttention
from tinsmith_megatron.experts import AdaptedExperts
from tinsmith_megatron.gated_delta import PackedGatedDelta
from tinsmith_megatron.latent_attention import SUBMODULES, LatentAttention
from tinsmith_megatron.linears import ColumnLinear, RowLinear
from tinsmith_megatron.norm import Norm
from tinsmith_megatron.program import Setup
from tinsmith_megatron.untyped import Untyped


def transformer_config(setup: Setup) -> Untyped:
    """Return Megatron's configuration of the model. Fusions are off: they need CUDA or TransformerEngine."""
    architecture, config = setup.architecture, setup.config
    shape, dtype = architecture.shape, getattr(torch, setup.dtype)
    facts = {**_of_experts(architecture), **_of_latents(architecture)}
    if architecture.hybrid is not None:
        facts |= {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}
    kind = TransformerConfig if architecture.latent is None else MLATransformerConfig
    return kind(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        qk_layernorm=architecture.qk_norm,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,  # all weights are read
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        recompute_granularity="full" if setup.checkpointing else None,
        recompute_method="uniform" if setup.checkpointing else None,
        recompute_num_layers=1 if setup.checkpointing else None,
        calculate_per_token_loss=True,  # losses are plain sums: the schedule must not divide them
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=config.tensor_parallel,
        sequence_parallel=config.tensor_parallel > 1,
        pipeline_model_parallel_size=config.pipeline_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,
        **facts,
    )


def _of_experts(architecture: Architecture) -> Mapping[str, Untyped]:
    experts, latents = architecture.shape.experts, architecture.latents
    if experts is None:
        return {}
    found = {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
    }
    if latents is None:
        return found
    grouped = latents.groups > 1
    return {
        **found,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": latents.routed_scale,
        "moe_router_num_groups": latents.groups if grouped else None,
        "moe_router_group_topk": latents.chosen_groups if grouped else None,
    }


def _of_latents(architecture: Architecture) -> Mapping[str, Untyped]:
    shape, latents = architecture.latent, architecture.latents
    if shape is None or latents is None:
        return {}
    return {
        "q_lora_rank": shape.query_rank,
        "kv_lora_rank": shape.rank,
        "qk_head_dim": shape.head_dim - shape.rotated_dim,
        "qk_pos_emb_head_dim": shape.rotated_dim,
        "v_head_dim": shape.value_dim,
        "rope_type": "yarn",  # also without it: the scale of scores then does not change
        "rotary_scaling_factor": latents.rope_factor,
        "mscale_all_dim": latents.mscale_all_dim,
    }


def block_spec(architecture: Architecture, layers: range) -> Untyped:
    """Return Megatron's specification of these layers, and of the last norm."""
    return TransformerBlockSubmodules(
        layer_specs=[_layer(_mixer(architecture, layer), _mlp(architecture, layer)) for layer in layers],
        layer_norm=Norm,
    )


def _layer(mixer: Untyped, mlp: Untyped) -> Untyped:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=mixer,
            self_attn_bda=_residual,
            pre_mlp_layernorm=Norm,
            mlp=mlp,
            mlp_bda=_residual,
        ),
    )


def _mixer(architecture: Architecture, layer: int) -> Untyped:
    hybrid = architecture.hybrid
    if hybrid is not None and layer in hybrid.delta_layers:
        return ModuleSpec(module=PackedGatedDelta, params={"rule": hybrid.delta})
    mask = {"attn_mask_type": AttnMaskType.causal}
    if architecture.latent is not None:
        return ModuleSpec(module=LatentAttention, params={**mask, "rope": architecture.rope}, submodules=SUBMODULES)
    norm_of_heads = Norm if architecture.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params=mask,
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=PackedAttention,
            linear_proj=RowLinear,
            q_layernorm=norm_of_heads,
            k_layernorm=norm_of_heads,
        ),
    )


def _mlp(architecture: Architecture, layer: int) -> Untyped:
    dense = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    if not architecture.shape.has_experts(layer):
        return ModuleSpec(module=MLP, submodules=dense)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=dense)
    experts = MoESubmodules(experts=ModuleSpec(module=AdaptedExperts), shared_experts=shared)
    return ModuleSpec(module=MoELayer, submodules=experts)


def _residual(training: bool, fused: bool) -> Untyped:  # noqa: ARG001, FBT001  (as Megatron calls it)
    """Return what adds a sublayer's output to the residual, in the place of bias, dropout and addition."""
    return lambda output_and_bias, residual, _: residual + output_and_bias[0]
