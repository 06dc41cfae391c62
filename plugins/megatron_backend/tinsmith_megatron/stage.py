"""One pipeline stage: Megatron's layers around this plugin's linear layers, attention, experts and head."""

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn

from tinsmith_checkpoints.huggingface import ATTENTION, EXPERTS, SHARED_EXPERT
from tinsmith_checkpoints.huggingface import MLP as MLP_MODULES
from tinsmith_megatron.architecture import Architecture
from tinsmith_megatron.attention import PackedAttention
from tinsmith_megatron.experts import AdaptedExperts
from tinsmith_megatron.gated_delta import PackedGatedDelta
from tinsmith_megatron.head import rows_of
from tinsmith_megatron.linears import AdaptedLinear, ColumnLinear, RowLinear
from tinsmith_megatron.program import Setup
from tinsmith_megatron.routing import ReplayedRouting
from tinsmith_megatron.streams import Stream
from tinsmith_megatron.untyped import Untyped
from tinsmith_workers.torch import LossTable, Scores, score, score_with_gradients


class Norm(nn.RMSNorm):
    """RMSNorm as Megatron builds it. Its own refuses divided sequences."""

    def __init__(self, *, config: Untyped, hidden_size: int, eps: float, **_: Untyped) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._less_1 = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._less_1:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class Stage(nn.Module):
    """The layers of one stage; the first also embeds, the last also scores. Its weights are empty when made."""

    model_type = ModelType.encoder_or_decoder  # Megatron's schedules ask

    def __init__(self, setup: Setup, losses: LossTable, *, trainable: bool = False) -> None:
        super().__init__()
        architecture = setup.architecture
        self.config = transformer_config(setup)
        self._losses = losses
        self.is_first = parallel_state.is_pipeline_first_stage()
        self.is_last = parallel_state.is_pipeline_last_stage()
        shape, divided = architecture.shape, self.config.sequence_parallel
        if self.is_first:
            self.embedding = VocabParallelEmbedding(
                shape.vocab_size,
                shape.hidden_size,
                init_method=lambda weight: weight,
                reduce_scatter_embeddings=divided,
                config=self.config,
            )
        self.decoder = TransformerBlock(
            config=self.config,
            spec=_block_spec(architecture, self.config),
            pre_process=self.is_first,
            post_process=self.is_last,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        if self.is_last:
            self.head = self._make_head(setup)
        self.inv_freq = torch.tensor(architecture.rope.inv_freq)
        self.requires_grad_(requires_grad=trainable)
        for index, layer in enumerate(self.decoder.layers):
            _name_modules(layer)
            if isinstance(layer.mlp, MoELayer):
                layer.mlp.router.router_replay = ReplayedRouting(index)
            layer.register_forward_pre_hook(_hand_out_stream, with_kwargs=True)
            layer.register_forward_hook(_forget_stream)

    def _make_head(self, setup: Setup) -> nn.Parameter:
        shape = setup.architecture.shape
        if shape.tied and self.is_first:
            weight = self.embedding.weight
            assert isinstance(weight, nn.Parameter)
            return weight
        rows = shape.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        return nn.Parameter(torch.empty(rows, shape.hidden_size, dtype=self.config.params_dtype))

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Take what the stage before has sent: called by Megatron's schedules."""
        self.decoder.set_input_tensor(tensors[0])

    def forward(self, stream: Stream, *, backward: bool) -> tuple[torch.Tensor, Scores | None]:
        """Return the hidden states for the next stage, or from the last one the summed loss and the scores."""
        hidden = self._embedded(stream, backward=backward) if self.is_first else None
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            attention_bias=stream,  # handed to every layer, and again when it is recomputed
            rotary_pos_emb=_angles(stream.positions_T, self.inv_freq.to(stream.tokens_T.device)),
        )
        if not self.is_last:
            return hidden, None
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        rows = rows_of(stream, self._losses, len(self.head), backward=backward)
        if backward:
            return score_with_gradients(hidden[:, 0], self.head, rows)
        scores = score(hidden[:, 0], self.head, rows)
        return scores.loss_TK.sum(), scores

    def _embedded(self, stream: Stream, *, backward: bool) -> torch.Tensor:
        hidden = self.embedding(stream.tokens_T[None])
        if not self.config.sequence_parallel:
            hidden = hidden.transpose(0, 1)
        hidden = hidden.contiguous()
        assert isinstance(hidden, torch.Tensor)
        return hidden.requires_grad_() if backward else hidden  # every stage hands a gradient to the one before


def transformer_config(setup: Setup) -> Untyped:
    """Return Megatron's configuration of the model. Fusions are off: they need CUDA or TransformerEngine."""
    shape, config = setup.architecture.shape, setup.config
    dtype = getattr(torch, setup.dtype)
    facts: dict[str, Untyped] = {}
    if shape.experts is not None:
        facts = {
            "num_moe_experts": shape.experts.num_experts,
            "moe_router_topk": shape.experts.top_k,
            "moe_ffn_hidden_size": shape.experts.intermediate_size,
            "moe_router_pre_softmax": not shape.experts.normalized,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": shape.experts.shared_size or None,
            "moe_shared_expert_gate": shape.experts.shared_gate,
        }
    if setup.architecture.hybrid is not None:
        facts |= {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=setup.architecture.rms_norm_eps,
        qk_layernorm=setup.architecture.qk_norm,
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


def _block_spec(architecture: Architecture, config: Untyped) -> Untyped:
    norm_of_heads = Norm if architecture.qk_norm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=PackedAttention,
            linear_proj=RowLinear,
            q_layernorm=norm_of_heads,
            k_layernorm=norm_of_heads,
        ),
    )
    dense = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    if architecture.shape.experts is None:
        mlp = ModuleSpec(module=MLP, submodules=dense)
    else:
        shared = ModuleSpec(module=SharedExpertMLP, submodules=dense)
        experts = MoESubmodules(experts=ModuleSpec(module=AdaptedExperts), shared_experts=shared)
        mlp = ModuleSpec(module=MoELayer, submodules=experts)

    def layer(mixer: Untyped) -> Untyped:
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

    num_layers = architecture.shape.num_layers // config.pipeline_model_parallel_size
    mixers = [attention] * num_layers
    if (hybrid := architecture.hybrid) is not None:
        first = parallel_state.get_pipeline_model_parallel_rank() * num_layers
        delta = ModuleSpec(module=PackedGatedDelta, params={"rule": hybrid.delta})
        mixers = [delta if first + n in hybrid.delta_layers else attention for n in range(num_layers)]
    return TransformerBlockSubmodules(layer_specs=[layer(mixer) for mixer in mixers], layer_norm=Norm)


def _residual(training: bool, fused: bool) -> Untyped:  # noqa: ARG001, FBT001  (as Megatron calls it)
    """Return what adds a sublayer's output to the residual, in the place of bias, dropout and addition."""
    return lambda output_and_bias, residual, _: residual + output_and_bias[0]


def _hand_out_stream(layer: Untyped, _: Untyped, arguments: Untyped) -> None:
    """Tell the layer's modules the stream of this call: several micro-batches are under way in a pipeline."""
    _set_stream(layer, arguments["attention_bias"])


def _forget_stream(layer: Untyped, _: Untyped, output: Untyped) -> None:  # noqa: ARG001  (as torch calls it)
    """It holds the adapters of the pass and their gradients. Megatron's dispatcher would keep the router's graph."""
    _set_stream(layer, None)
    if isinstance(layer.mlp, MoELayer):
        layer.mlp.token_dispatcher.probs = layer.mlp.token_dispatcher.routing_map = None


def _set_stream(layer: Untyped, stream: Stream | None) -> None:
    for module in layer.modules():
        if isinstance(module, AdaptedLinear | AdaptedExperts | PackedAttention | PackedGatedDelta | ReplayedRouting):
            module.stream = stream


def _name_modules(layer: Untyped) -> None:
    """Tell the adapted modules of a layer their canonical names."""
    prefix = f"model.layers.{layer.layer_number - 1}"
    if not isinstance(layer.self_attention, PackedGatedDelta):  # which knows its own
        layer.self_attention.linear_qkv.modules_ = [f"{prefix}.{kind}" for kind in ATTENTION[:3]]
        layer.self_attention.linear_proj.modules_ = [f"{prefix}.{ATTENTION[3]}"]
    if isinstance(layer.mlp, MoELayer):
        layer.mlp.experts.modules_ = [f"{prefix}.{kind}" for kind in EXPERTS]
        layer.mlp.experts.dispatched = layer.mlp.token_dispatcher
    mlp, modules = (
        (layer.mlp.shared_experts, SHARED_EXPERT) if isinstance(layer.mlp, MoELayer) else (layer.mlp, MLP_MODULES)
    )
    if mlp is not None:
        mlp.linear_fc1.modules_ = [f"{prefix}.{kind}" for kind in modules[:2]]
        mlp.linear_fc2.modules_ = [f"{prefix}.{modules[2]}"]


def _angles(positions_T: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return the rotary angles of each row, [T, 1, 1, head_dim]."""
    half = positions_T[:, None].float() * inv_freq
    return torch.cat([half, half], dim=-1)[:, None, None]
