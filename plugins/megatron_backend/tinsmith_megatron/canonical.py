"""The canonical tensors that lie in Megatron's parameters: which rows and columns of them, and where.

A parameter may fuse several, and a rank may hold a part of each.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from tinsmith_checkpoints.huggingface import DELTA, DecoderShape, HybridShape, LatentShape, WeightFiles
from tinsmith_megatron.gated_delta import PackedGatedDelta
from tinsmith_megatron.latent_attention import LatentAttention
from tinsmith_megatron.linears import ColumnLinear, RowLinear
from tinsmith_megatron.parallel import Coordinates
from tinsmith_megatron.program import Setup
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.untyped import Untyped
from tinsmith_workers import ModelPart
from tinsmith_workers.torch import Piece

Named = tuple[torch.Tensor, Sequence[Piece], str]
"""A parameter, or a correction of a router; the pieces in it; and which ranks hold the same numbers."""


def named(stage: Stage, setup: Setup, coordinates: Coordinates, part: ModelPart) -> list[Named]:
    """Return all that is read from files."""
    found = list(_Namer(setup.architecture.shape, coordinates, part, setup.config.tensor_parallel).of(stage))
    assert {id(tensor) for tensor, _, _ in found} >= {id(parameter) for parameter in stage.parameters()}
    return found


def read(files: WeightFiles, pieces: Iterable[Piece], matrix: torch.Tensor) -> int:
    """Read pieces into the matrix in which they lie. Return the bytes. Raise the errors of `WeightFiles`."""
    num_bytes = 0
    for piece in pieces:
        rows = slice(piece.start, piece.start + piece.count)
        cut = (rows,) if piece.columns is None else (rows, piece.columns)
        found = torch.as_tensor(files.part(piece.name, piece.shape, cut))
        matrix[piece.local : piece.local + piece.count].copy_(found.reshape(piece.count, -1))
        num_bytes += found.numel() * found.element_size()
    return num_bytes


def matrix_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter as rows and columns."""
    weight = parameter.detach()
    return weight[:, None] if weight.dim() == 1 else weight.reshape(-1, weight.shape[-1])


class _Namer:
    """The pieces of Megatron's parameters."""

    def __init__(self, shape: DecoderShape, coordinates: Coordinates, part: ModelPart, tp_size: int) -> None:
        self._shape, self._coordinates, self._part, self._tp_size = shape, coordinates, part, tp_size

    def of(self, stage: Stage) -> Iterator[Named]:
        shape = self._shape
        table = (shape.vocab_size, shape.hidden_size)
        if stage.is_first:
            yield stage.embedding.weight, [self._rows("model.embed_tokens.weight", table)], "divided"
        for layer in stage.decoder.layers:
            yield from self._of_layer(layer)
        if stage.is_last:
            yield self._whole(stage.decoder.final_layernorm.weight, "model.norm.weight")
            if not (shape.tied and stage.is_first):
                name = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
                yield stage.head, [self._rows(name, table)], "divided"

    def _of_layer(self, layer: Untyped) -> Iterator[Named]:
        number = layer.layer_number - 1
        prefix, mixer = f"model.layers.{number}", layer.self_attention
        if isinstance(mixer, PackedGatedDelta):
            yield from self._gated_delta(mixer, prefix)
        elif isinstance(mixer, LatentAttention):
            yield from self._latent_attention(mixer, prefix)
        else:
            yield from self._attention(mixer, f"{prefix}.self_attn")
        yield self._whole(layer.input_layernorm.weight, f"{prefix}.input_layernorm.weight")
        yield self._whole(layer.pre_mlp_layernorm.weight, f"{prefix}.post_attention_layernorm.weight")
        if self._shape.has_experts(number):
            yield from self._experts(layer.mlp, prefix)
        else:
            yield from self._mlp(layer.mlp, f"{prefix}.mlp", self._shape.intermediate_size)

    def _attention(self, attention: Untyped, prefix: str) -> Iterator[Named]:
        yield attention.linear_qkv.weight, list(self._qkv(prefix)), "divided"
        o = self._columns(f"{prefix}.o_proj.weight", (self._shape.hidden_size, self._shape.q_size))
        yield attention.linear_proj.weight, [o], "divided"
        for name, norm in {"q_norm": attention.q_layernorm, "k_norm": attention.k_layernorm}.items():
            if isinstance(norm, nn.RMSNorm):
                yield self._whole(norm.weight, f"{prefix}.{name}.weight")

    def _latent_attention(self, attention: LatentAttention, prefix: str) -> Iterator[Named]:
        """Heads are divided; what makes latents is not."""
        assert isinstance(self._shape, LatentShape)
        shapes = self._shape.linear_shapes()
        for path, projection in attention.projections().items():
            name, (inputs, outputs) = f"{prefix}.{path}.weight", shapes[path]
            if isinstance(projection, ColumnLinear):
                yield projection.weight, [self._rows(name, (outputs, inputs))], "divided"
            elif isinstance(projection, RowLinear):
                yield projection.weight, [self._columns(name, (outputs, inputs))], "divided"
            else:
                yield self._whole(projection.weight, name)
        if self._shape.query_rank:
            yield self._whole(attention.q_layernorm.weight, f"{prefix}.self_attn.q_a_layernorm.weight")
        yield self._whole(attention.kv_layernorm.weight, f"{prefix}.self_attn.kv_a_layernorm.weight")

    def _gated_delta(self, mixer: PackedGatedDelta, prefix: str) -> Iterator[Named]:
        """Queries, keys and values lie in one matrix, one below the other; each is divided by heads."""
        assert isinstance(self._shape, HybridShape)
        shapes, rule, own = self._shape.linear_shapes(), self._shape.delta, f"{prefix}.linear_attn"
        pieces, local = list[Piece](), 0
        for path in DELTA[:-1]:
            inputs, outputs = shapes[path]
            heights = rule.mixed_sizes if path == DELTA[0] else (outputs,)
            pieces += self._each_divided(f"{prefix}.{path}.weight", (outputs, inputs), heights, local)
            local += outputs // self._tp_size
        yield mixer.in_proj.weight, pieces, "divided"
        out = self._columns(f"{prefix}.{DELTA[-1]}.weight", (self._shape.hidden_size, rule.value_size))
        yield mixer.out_proj.weight, [out], "divided"
        channels = (rule.mixed_size, 1, rule.width)
        yield mixer.convolution, self._each_divided(f"{own}.conv1d.weight", channels, rule.mixed_sizes), "divided"
        for name, parameter in {"A_log": mixer.decay, "dt_bias": mixer.step}.items():
            yield parameter, self._each_divided(f"{own}.{name}", (rule.value_heads,), (rule.value_heads,)), "divided"
        yield self._whole(mixer.norm, f"{own}.norm.weight")

    def _qkv(self, prefix: str) -> Iterator[Piece]:
        """Queries, keys and values alternate by key-value head; with a gate, see `ColumnLinear`."""
        shape = self._shape
        if isinstance(shape, HybridShape):
            yield from self._gated_qkv(prefix)
            return
        heights = {"q": shape.q_size // shape.num_kv_heads, "k": shape.head_dim, "v": shape.head_dim}
        local = 0
        for group in self._own_groups():
            for letter, height in heights.items():
                whole = (height * shape.num_kv_heads, shape.hidden_size)
                name = f"{prefix}.{letter}_proj.weight"
                yield Piece(name=name, shape=whole, start=group * height, local=local, count=height)
                local += height

    def _own_groups(self) -> range:
        groups = self._shape.num_kv_heads // self._tp_size
        return range(self._coordinates.tp_rank * groups, (self._coordinates.tp_rank + 1) * groups)

    def _gated_qkv(self, prefix: str) -> Iterator[Piece]:
        shape = self._shape
        heads, size, local = shape.num_heads // shape.num_kv_heads, shape.head_dim, 0
        for group in self._own_groups():
            queries = [2 * size * head for head in range(group * heads, (group + 1) * heads)]
            rows = [("q", start) for start in (*queries, *(start + size for start in queries))]
            for letter, start in (*rows, ("k", group * size), ("v", group * size)):
                path = f"self_attn.{letter}_proj"
                whole = (shape.linear_shapes()[path][1], shape.hidden_size)
                name = f"{prefix}.{letter}_proj.weight"
                yield Piece(name=name, shape=whole, start=start, local=local, count=size)
                local += size

    def _mlp(self, mlp: Untyped, prefix: str, inner: int) -> Iterator[Named]:
        hidden = self._shape.hidden_size
        gate = self._rows(f"{prefix}.gate_proj.weight", (inner, hidden))
        up = self._rows(f"{prefix}.up_proj.weight", (inner, hidden), local=inner // self._tp_size)
        yield mlp.linear_fc1.weight, [gate, up], "divided"
        down = self._columns(f"{prefix}.down_proj.weight", (hidden, inner))
        yield mlp.linear_fc2.weight, [down], "divided"

    def _experts(self, moe: Untyped, prefix: str) -> Iterator[Named]:
        experts = self._shape.experts
        assert experts is not None
        hidden, inner = self._shape.hidden_size, experts.intermediate_size
        yield self._whole(moe.router.weight, f"{prefix}.mlp.gate.weight")
        if moe.router.expert_bias is not None:
            yield self._whole(moe.router.expert_bias, f"{prefix}.mlp.gate.e_score_correction_bias")
        if experts.shared_size:
            path, _ = experts.shared_modules[0].rsplit(".", 1)
            yield from self._mlp(moe.shared_experts, f"{prefix}.{path}", experts.shared_size)
        if experts.shared_gate:
            yield self._whole(moe.shared_experts.gate_weight, f"{prefix}.mlp.shared_expert_gate.weight")
        gate_up, down = [], []
        for index, expert in enumerate(self._part.experts):
            own = f"{prefix}.mlp.experts.{expert}"
            for number, name in enumerate(("gate", "up")):
                local = (2 * index + number) * inner
                gate_up.append(_all_rows(f"{own}.{name}_proj.weight", (inner, hidden), local))
            down.append(_all_rows(f"{own}.down_proj.weight", (hidden, inner), index * hidden))
        yield moe.experts.gate_up, gate_up, "experts"
        yield moe.experts.down, down, "experts"

    def _whole(self, parameter: torch.Tensor, name: str) -> Named:
        return parameter, [_all_rows(name, tuple(parameter.shape), 0)], "repeated"

    def _rows(self, name: str, shape: tuple[int, int], local: int = 0) -> Piece:
        each = shape[0] // self._tp_size
        return Piece(name=name, shape=shape, start=self._coordinates.tp_rank * each, local=local, count=each)

    def _each_divided(
        self, name: str, shape: tuple[int, ...], heights: Sequence[int], local: int = 0
    ) -> Sequence[Piece]:
        """Return this rank's share of each of the parts, of such heights, that lie one below the other."""
        pieces, first = [], 0
        for height in heights:
            each = height // self._tp_size
            start = first + self._coordinates.tp_rank * each
            pieces.append(Piece(name=name, shape=shape, start=start, local=local, count=each))
            first, local = first + height, local + each
        return pieces

    def _columns(self, name: str, shape: tuple[int, int]) -> Piece:
        each = shape[1] // self._tp_size
        columns = (
            slice(self._coordinates.tp_rank * each, (self._coordinates.tp_rank + 1) * each)
            if self._tp_size > 1
            else None
        )
        return Piece(name=name, shape=shape, start=0, local=0, count=shape[0], columns=columns)


def _all_rows(name: str, shape: tuple[int, ...], local: int) -> Piece:
    return Piece(name=name, shape=shape, start=0, local=local, count=shape[0])
