"""A rank's share of a fully trained model: rows of each parameter, and their positions in canonical tensors.

The ranks that compute the same parameter divide its rows for everything but the passes: float32 weights, moments and
the pending gradient (ZeRO, Rajbhandari et al. 2020). A parameter of Megatron's may fuse several canonical tensors.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from tinsmith_checkpoints.huggingface import DELTA, DecoderShape, HybridShape, WeightFiles
from tinsmith_megatron.gated_delta import PackedGatedDelta
from tinsmith_megatron.parallel import Coordinates
from tinsmith_megatron.program import Setup
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.untyped import Untyped
from tinsmith_workers import ModelPart
from tinsmith_workers.torch import Piece, all_gather_single, reduce_scatter_single


@dataclass(slots=True)
class Shard:
    """A parameter and this rank's rows of it. Its matrix has the rows of all experts one below the other."""

    parameter: nn.Parameter
    pieces: tuple[Piece, ...]  # of the whole parameter
    group: dist.ProcessGroup
    counts: bool  # else another stage holds it, too
    rows: range = field(init=False)
    height: int = field(init=False)  # rows of each rank of the group; the last ranks may have fewer
    weights: torch.Tensor = field(init=False)
    m: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    gradient: torch.Tensor | None = field(init=False, default=None)  # pending
    passing: torch.Tensor | None = field(init=False, default=None)  # of the whole parameter, in the current pass

    def __post_init__(self) -> None:
        matrix = self.matrix
        self.height = -(-len(matrix) // self.group.size())
        start = min(dist.get_rank(self.group) * self.height, len(matrix))
        self.rows = range(start, min(start + self.height, len(matrix)))
        own = matrix[self.rows.start : self.rows.stop]
        self.weights = own if own.dtype == torch.float32 else own.float()
        self.m, self.v = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.parameter.register_post_accumulate_grad_hook(self._take)

    @property
    def matrix(self) -> torch.Tensor:
        return matrix_of(self.parameter)

    @property
    def own_pieces(self) -> Iterator[Piece]:
        """Yield what lies in this rank's rows."""
        for piece in self.pieces:
            if (own := piece.within(self.rows)) is not None:
                yield own

    def begin_gradient(self) -> None:
        self.gradient = torch.zeros_like(self.weights)

    def drop_gradient(self) -> None:
        self.gradient = None

    def _take(self, parameter: torch.Tensor) -> None:
        """Add a micro-batch's gradient in float32."""
        assert self.passing is not None
        assert parameter.grad is not None
        self.passing.add_(parameter.grad.view_as(self.passing))
        parameter.grad = None

    def begin(self) -> None:
        """Make room for the gradient of a pass."""
        self.passing = torch.zeros_like(self.matrix, dtype=torch.float32)

    def end(self) -> None:
        """Add this rank's rows of the sum over the group to the pending gradient."""
        assert self.passing is not None
        whole, self.passing = self.passing, None
        if self.group.size() > 1:
            found = whole.new_empty(self.height, whole.shape[1])
            reduce_scatter_single(found, self._padded(whole), group=self.group)
            whole = found[: len(self.rows)]
        self.gradient = whole if self.gradient is None else self.gradient.add_(whole)

    def spread(self) -> None:
        """Give the group the weights of this rank's rows, in the dtype in which they are computed with."""
        matrix = self.matrix
        own = self.weights.to(matrix.dtype)
        if self.group.size() > 1:
            gathered = matrix.new_empty(self.height * self.group.size(), matrix.shape[1])
            all_gather_single(gathered, self._padded(own, self.height), group=self.group)
            matrix.copy_(gathered[: len(matrix)])
        else:
            matrix.copy_(own)

    def _padded(self, rows: torch.Tensor, height: int | None = None) -> torch.Tensor:
        missing = (height or self.height * self.group.size()) - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows.contiguous()


def matrix_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return the parameter as rows and columns."""
    weight = parameter.detach()
    return weight[:, None] if weight.dim() == 1 else weight.reshape(-1, weight.shape[-1])


def shards_of(stage: Stage, setup: Setup, coordinates: Coordinates, part: ModelPart) -> list[Shard]:
    """Return a shard of every parameter."""
    groups = {
        "divided": parallel_state.get_data_parallel_group(),
        "repeated": parallel_state.get_tensor_and_data_parallel_group(),
        "experts": parallel_state.get_expert_data_parallel_group(),
    }
    tied = setup.architecture.shape.tied
    return [
        Shard(
            parameter,
            tuple(pieces),
            groups[kind],
            counts=not (tied and stage.is_last and not stage.is_first and parameter is stage.head),
        )
        for parameter, pieces, kind in named(stage, setup, coordinates, part)
    ]


def named(stage: Stage, setup: Setup, coordinates: Coordinates, part: ModelPart) -> list["Named"]:
    """Return every parameter, with the pieces that lie in it, and the ranks that hold the same numbers."""
    found = list(_Namer(setup.architecture.shape, coordinates, part, setup.config.tensor_parallel).of(stage))
    assert {id(parameter) for parameter, _, _ in found} == {id(parameter) for parameter in stage.parameters()}
    return found


def read(files: WeightFiles, pieces: Iterable[Piece], matrix: torch.Tensor) -> int:
    """Read pieces into the matrix in which they lie. Return the bytes. Raise the errors of `WeightFiles`."""
    num_bytes = 0
    for piece in pieces:
        rows = slice(piece.start, piece.start + piece.count)
        cut = (rows,) if piece.columns is None else (rows, piece.columns)
        found = files.part(piece.name, piece.shape, cut)
        matrix[piece.local : piece.local + piece.count].copy_(found.reshape(piece.count, -1))
        num_bytes += found.numel() * found.element_size()
    return num_bytes


Named = tuple[nn.Parameter, Sequence[Piece], str]


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

    def _of_layer(self, layer: object) -> Iterator[Named]:
        prefix = f"model.layers.{layer.layer_number - 1}"  # type: ignore[attr-defined]  # Megatron's
        mixer, mlp = layer.self_attention, layer.mlp  # type: ignore[attr-defined]  # Megatron's
        if isinstance(mixer, PackedGatedDelta):
            yield from self._gated_delta(mixer, prefix)
        else:
            yield from self._attention(mixer, f"{prefix}.self_attn")
        yield self._whole(layer.input_layernorm.weight, f"{prefix}.input_layernorm.weight")  # type: ignore[attr-defined]
        yield self._whole(layer.pre_mlp_layernorm.weight, f"{prefix}.post_attention_layernorm.weight")  # type: ignore[attr-defined]
        if self._shape.experts is None:
            yield from self._mlp(mlp, f"{prefix}.mlp", self._shape.intermediate_size)
        else:
            yield from self._experts(mlp, f"{prefix}.mlp")

    def _attention(self, attention: Untyped, prefix: str) -> Iterator[Named]:
        yield attention.linear_qkv.weight, list(self._qkv(prefix)), "divided"
        o = self._columns(f"{prefix}.o_proj.weight", (self._shape.hidden_size, self._shape.q_size))
        yield attention.linear_proj.weight, [o], "divided"
        for name, norm in {"q_norm": attention.q_layernorm, "k_norm": attention.k_layernorm}.items():
            if isinstance(norm, nn.RMSNorm):
                yield self._whole(norm.weight, f"{prefix}.{name}.weight")

    def _gated_delta(self, mixer: PackedGatedDelta, prefix: str) -> Iterator[Named]:
        shapes, pieces, local = self._shape.linear_shapes(), list[Piece](), 0
        for path in DELTA[:-1]:
            inputs, outputs = shapes[path]
            pieces.append(_all_rows(f"{prefix}.{path}.weight", (outputs, inputs), local))
            local += outputs
        yield mixer.in_proj.weight, pieces, "divided"
        yield self._whole(mixer.out_proj.weight, f"{prefix}.{DELTA[-1]}.weight")
        own = f"{prefix}.linear_attn"
        yield self._whole(mixer.convolution, f"{own}.conv1d.weight")
        yield self._whole(mixer.decay, f"{own}.A_log")
        yield self._whole(mixer.step, f"{own}.dt_bias")
        yield self._whole(mixer.norm, f"{own}.norm.weight")

    def _qkv(self, prefix: str) -> Iterator[Piece]:
        """Queries, keys and values alternate by key-value head; with a gate, see `ColumnLinear`."""
        shape = self._shape
        if isinstance(shape, HybridShape):
            yield from self._gated_qkv(prefix)
            return
        groups = shape.num_kv_heads // self._tp_size
        heights = {"q": shape.q_size // shape.num_kv_heads, "k": shape.head_dim, "v": shape.head_dim}
        local = 0
        for group in range(self._coordinates.tp_rank * groups, (self._coordinates.tp_rank + 1) * groups):
            for letter, height in heights.items():
                whole = (height * shape.num_kv_heads, shape.hidden_size)
                name = f"{prefix}.{letter}_proj.weight"
                yield Piece(name=name, shape=whole, start=group * height, local=local, count=height)
                local += height

    def _gated_qkv(self, prefix: str) -> Iterator[Piece]:
        shape = self._shape
        heads, size, local = shape.num_heads // shape.num_kv_heads, shape.head_dim, 0
        for group in range(shape.num_kv_heads):
            queries = [2 * size * head for head in range(group * heads, (group + 1) * heads)]
            rows = [("q", start) for start in (*queries, *(start + size for start in queries))]
            for letter, start in (*rows, ("k", group * size), ("v", group * size)):
                path = f"self_attn.{letter}_proj"
                whole = (shape.linear_shapes()[path][1], shape.hidden_size)
                name = f"{prefix}.{letter}_proj.weight"
                yield Piece(name=name, shape=whole, start=start, local=local, count=size)
                local += size

    def _mlp(self, mlp: object, prefix: str, inner: int) -> Iterator[Named]:
        hidden = self._shape.hidden_size
        gate = self._rows(f"{prefix}.gate_proj.weight", (inner, hidden))
        up = self._rows(f"{prefix}.up_proj.weight", (inner, hidden), local=inner // self._tp_size)
        yield mlp.linear_fc1.weight, [gate, up], "divided"  # type: ignore[attr-defined]  # Megatron's
        down = self._columns(f"{prefix}.down_proj.weight", (hidden, inner))
        yield mlp.linear_fc2.weight, [down], "divided"  # type: ignore[attr-defined]  # Megatron's

    def _experts(self, moe: object, prefix: str) -> Iterator[Named]:
        assert self._shape.experts is not None
        hidden, inner = self._shape.hidden_size, self._shape.experts.intermediate_size
        yield self._whole(moe.router.weight, f"{prefix}.gate.weight")  # type: ignore[attr-defined]  # Megatron's
        if self._shape.experts.shared_size:
            shared = moe.shared_experts  # type: ignore[attr-defined]  # Megatron's
            yield from self._mlp(shared, f"{prefix}.shared_expert", self._shape.experts.shared_size)
            yield self._whole(shared.gate_weight, f"{prefix}.shared_expert_gate.weight")
        gate_up, down = [], []
        for index, expert in enumerate(self._part.experts):
            own = f"{prefix}.experts.{expert}"
            for number, name in enumerate(("gate", "up")):
                local = (2 * index + number) * inner
                gate_up.append(_all_rows(f"{own}.{name}_proj.weight", (inner, hidden), local))
            down.append(_all_rows(f"{own}.down_proj.weight", (hidden, inner), index * hidden))
        yield moe.experts.gate_up, gate_up, "experts"  # type: ignore[attr-defined]  # ours, in Megatron's layer
        yield moe.experts.down, down, "experts"  # type: ignore[attr-defined]  # as above

    def _whole(self, parameter: nn.Parameter, name: str) -> Named:
        return parameter, [_all_rows(name, tuple(parameter.shape), 0)], "repeated"

    def _rows(self, name: str, shape: tuple[int, int], local: int = 0) -> Piece:
        each = shape[0] // self._tp_size
        return Piece(name=name, shape=shape, start=self._coordinates.tp_rank * each, local=local, count=each)

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
