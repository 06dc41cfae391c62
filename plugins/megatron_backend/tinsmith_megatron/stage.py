"""One pipeline stage: Megatron's layers around this plugin's linear layers, attention, experts and head."""

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from tinsmith_checkpoints.huggingface import ATTENTION, EXPERTS, MLP, DecoderShape
from tinsmith_megatron.attention import PackedAttention
from tinsmith_megatron.experts import AdaptedExperts
from tinsmith_megatron.gated_delta import PackedGatedDelta
from tinsmith_megatron.head import rows_of
from tinsmith_megatron.latent_attention import LatentAttention
from tinsmith_megatron.layers import block_spec, transformer_config
from tinsmith_megatron.linears import AdaptedLinear
from tinsmith_megatron.program import Setup
from tinsmith_megatron.rotation import PackedRotation, angles
from tinsmith_megatron.routing import ReplayedRouting
from tinsmith_megatron.streams import Stream
from tinsmith_megatron.untyped import Untyped
from tinsmith_workers.torch import LossTable, Scores, score, score_with_gradients


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
            spec=block_spec(architecture, self._layers(shape.num_layers)),
            pre_process=self.is_first,
            post_process=self.is_last,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        if self.is_last:
            self.head = self._make_head(setup)
        self.inv_freq = torch.tensor(architecture.rope.inv_freq)
        self.requires_grad_(requires_grad=trainable)
        for layer in self.decoder.layers:
            _name_modules(layer, shape)
            layer.register_forward_pre_hook(_hand_out_stream, with_kwargs=True)
            layer.register_forward_hook(_forget_stream)
        for index, moe in enumerate(layer.mlp for layer in self.decoder.layers if isinstance(layer.mlp, MoELayer)):
            moe.router.router_replay = ReplayedRouting(index)

    def _layers(self, num_layers: int) -> range:
        """Return the numbers of this stage's layers in the model."""
        each = num_layers // self.config.pipeline_model_parallel_size
        first = parallel_state.get_pipeline_model_parallel_rank() * each
        return range(first, first + each)

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
            rotary_pos_emb=angles(stream.positions_T, self.inv_freq.to(stream.tokens_T.device)),
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


def _hand_out_stream(layer: Untyped, arguments: Untyped, named: Untyped) -> Untyped:
    """Tell the layer's modules the stream of this call: several micro-batches are under way in a pipeline.

    Attention by latents takes no angles from outside, and no attention takes a bias.
    """
    _set_stream(layer, named["attention_bias"])
    outside = None if isinstance(layer.self_attention, LatentAttention) else named["rotary_pos_emb"]
    return arguments, {**named, "attention_bias": None, "rotary_pos_emb": outside}


def _forget_stream(layer: Untyped, _: Untyped, output: Untyped) -> None:  # noqa: ARG001  (as torch calls it)
    """It holds the adapters of the pass and their gradients. Megatron's dispatcher would keep the router's graph."""
    _set_stream(layer, None)
    if isinstance(layer.mlp, MoELayer):
        layer.mlp.token_dispatcher.probs = layer.mlp.token_dispatcher.routing_map = None


def _set_stream(layer: Untyped, stream: Stream | None) -> None:
    for module in layer.modules():
        if isinstance(module, _TOLD):
            module.stream = stream


_TOLD = (AdaptedLinear, AdaptedExperts, PackedAttention, PackedGatedDelta, PackedRotation, ReplayedRouting)


def _name_modules(layer: Untyped, shape: DecoderShape) -> None:
    """Tell the adapted modules of a layer their canonical names."""
    prefix, attention = f"model.layers.{layer.layer_number - 1}", layer.self_attention
    if isinstance(attention, LatentAttention):
        for path, projection in attention.projections().items():
            projection.modules_ = [f"{prefix}.{path}"]
    elif not isinstance(attention, PackedGatedDelta):  # which knows its own
        attention.linear_qkv.modules_ = [f"{prefix}.{kind}" for kind in ATTENTION[:3]]
        attention.linear_proj.modules_ = [f"{prefix}.{ATTENTION[3]}"]
    mlp: Untyped = layer.mlp
    modules: Sequence[str] = MLP
    if isinstance(mlp, MoELayer):
        assert shape.experts is not None
        mlp.experts.modules_ = [f"{prefix}.{kind}" for kind in EXPERTS]
        mlp.experts.dispatched = mlp.token_dispatcher
        mlp, modules = mlp.shared_experts, shape.experts.shared_modules
    if mlp is not None:
        *inputs, down = modules
        mlp.linear_fc1.modules_ = [f"{prefix}.{kind}" for kind in inputs]
        mlp.linear_fc2.modules_ = [f"{prefix}.{down}"]
