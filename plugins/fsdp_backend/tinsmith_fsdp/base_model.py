"""The base model from a Hugging Face directory to sharded weights: built on the meta device, sharded, then allocated.

Each rank reads only its own rows of every tensor from the safetensors files. No rank ever holds the whole model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tinsmith import ConfigError
from tinsmith_checkpoints.huggingface import (
    MLP,
    JoinedMatrix,
    WeightFiles,
    joined_matrices,
    read_model_config,
)
from tinsmith_fsdp import experts
from tinsmith_fsdp.causal_lm import (
    Buffer,
    class_of,
    computed_buffers,
    mix_packed,
    read_config,
    require_parts,
    stored_buffers,
)
from tinsmith_fsdp.expert_files import ExpertFiles
from tinsmith_fsdp.lora import Adapters, JoinedLoraLinear, MultiLoraLinear
from tinsmith_fsdp.mesh import Mesh
from tinsmith_fsdp.packed_model import PackedModel, canonical_name
from tinsmith_fsdp.program import Loaded, Setup
from tinsmith_fsdp.shortage import RECOVERS, Shortage
from tinsmith_fsdp.streams import Stream
from tinsmith_fsdp.tensor_parallel import gather_tokens
from tinsmith_workers.torch import LossTable, Scores, Vocabulary

_NORMS = ("input_layernorm", "post_attention_layernorm")  # of a layer: attention and MLP take what they return
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_COLUMN = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})  # the others are row-parallel
_KINDS = ("weight", "weight_scale", "bias")  # of a linear layer's parameters
Report = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """A parameter's shard on this rank: the rows and columns of the whole tensor that it holds."""

    name: str  # canonical
    parameter: nn.Parameter
    shape: tuple[int, ...]  # of the whole tensor
    rows: slice
    columns: slice | None
    across_tp: Literal["divided", "alone", "partial"]  # partial: each tp rank has a part of the gradient

    @property
    def local(self) -> torch.Tensor:
        tensor = self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter
        return tensor.detach()


class BaseModel:
    """The sharded model and the list of its shards.

    `trainable`: the model is a copy whose own weights are trained. Its weights are kept in float32 and computed with in
    the configured dtype. Gradients are sums over the ranks, never means, and are sharded like their weights.
    """

    def __init__(self, setup: Setup, mesh: Mesh, *, trainable: bool = False) -> None:
        self._setup, self._mesh, self._trainable = setup, mesh, trainable
        self._directory = Path(setup.model_path)
        config = read_config(self._directory)
        with torch.device("meta"):
            causal_lm = class_of(setup.architecture.class_name, config)(config)
        require_parts(causal_lm)
        rotary = type(causal_lm.model.rotary_emb)(config=config)  # not on meta: it has buffers, which would be empty
        causal_lm.model.rotary_emb = rotary
        buffers = computed_buffers(causal_lm, mesh.device)
        self._in_files = {name: buffers[name] for name in stored_buffers(causal_lm)}
        causal_lm.to(torch.float32 if trainable else getattr(torch, setup.dtype))
        causal_lm.tie_weights()
        mix_packed(causal_lm)
        causal_lm.eval().requires_grad_(requires_grad=trainable)
        self._adapt(causal_lm)
        shapes = {name: tuple(p.shape) for name, p in causal_lm.named_parameters()}
        self._divide(causal_lm)
        self.model = PackedModel(causal_lm, checkpointing=setup.checkpointing)
        if mesh.tp_size > 1:
            self.model.vocabulary = Vocabulary(self._range(config.vocab_size)[0], mesh.tp.get_group())
        self.all_meta = all(parameter.is_meta for parameter in self.model.parameters())
        self._shard()
        self._allocate(rotary, buffers)
        self.parts = list(self._parts(shapes))
        self.read_bytes = 0
        self.shortage = self._shortage()
        if setup.compile:
            for layer in self.model.layers:
                layer.inner.compile(dynamic=True)  # type: ignore[union-attr]  # one code for all layers

    def _allocate(self, rotary: nn.Module, buffers: Mapping[str, Buffer]) -> None:
        head, embedding = self.model.lm_head, self.model.embed_tokens
        tied = head.weight is embedding.weight
        self.model.to_empty(device=self._mesh.device)
        for module, name, buffer in buffers.values():
            module.register_buffer(name, buffer, persistent=False)
        if tied and head.weight is not embedding.weight:  # a plain tensor is replaced, in each module by itself
            head.weight = embedding.weight
        self.model.set_rotary(rotary.to(self._mesh.device))

    def _adapt(self, causal_lm: nn.Module) -> None:
        """Replace every linear layer by an adaptable one."""
        shape, shapes = self._setup.architecture, self._setup.architecture.linear_shapes()
        matrices = joined_matrices(read_model_config(self._directory))
        for index, layer in enumerate(causal_lm.model.layers):  # type: ignore[union-attr, arg-type]  # a ModuleList
            there = {name for name, _ in layer.named_modules()}
            joined = [matrix for matrix in matrices if matrix.path in there]
            for path in (*shape.mixer_modules(index), *shape.feed_forward_modules(index)):
                if any(path in matrix.modules for matrix in joined):
                    continue
                cut = 0 if path.rpartition(".")[2] in _COLUMN else 1
                module = f"model.layers.{index}.{path}"
                linear = _linear_of(layer, path, shapes[path], module, shape.mixer_modules(index))
                scales = None if shape.int8 is None else shape.int8.num_scales(linear.in_features)
                layer.set_submodule(path, MultiLoraLinear(linear, module, cut, num_scales=scales))
            for matrix in joined:
                layer.set_submodule(matrix.path, _joined(layer, matrix, shapes, index))
            if shape.experts is not None and shape.has_experts(index):
                experts.adapt(layer, f"model.layers.{index}", shape.experts)

    def _divide(self, causal_lm: nn.Module) -> None:
        """Divide the matrices, the vocabulary and the tokens between layers over the tp axis."""
        if self._mesh.tp_size == 1:
            return
        for linear in causal_lm.modules():
            if isinstance(linear, MultiLoraLinear):
                assert linear.cut is not None
                linear.group, linear.tp_rank = self._mesh.tp.get_group(), self._mesh.tp_rank
                linear.weight = self._divided(linear.weight, linear.cut)
                if linear.bias is not None and linear.cut == 0:
                    linear.bias = self._divided(linear.bias, 0)
                if linear.weight_scale is not None and (linear.cut == 0 or linear.weight_scale.shape[1] > 1):
                    linear.weight_scale = self._divided(linear.weight_scale, linear.cut)
        for name, module in causal_lm.named_modules():
            if name.endswith(_NORMS):
                module.register_forward_hook(self._gather_tokens)
        self._divide_vocabulary(causal_lm)

    def _gather_tokens(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        """Gather all tokens after a norm, which computes this rank's tokens only."""
        del module, args
        return gather_tokens(output, self._mesh.tp.get_group())

    def _divide_vocabulary(self, causal_lm: nn.Module) -> None:
        embedding, head = causal_lm.get_submodule("model.embed_tokens"), causal_lm.get_submodule("lm_head")
        tied = head.weight is embedding.weight
        embedding.weight = self._divided(embedding.weight, 0)  # type: ignore[arg-type]  # a parameter
        head.weight = embedding.weight if tied else self._divided(head.weight, 0)  # type: ignore[arg-type]

    def _divided(self, parameter: torch.Tensor, dim: int) -> nn.Parameter:
        local = torch.chunk(parameter.detach(), self._mesh.tp_size, dim)[self._mesh.tp_rank].contiguous()
        divided = DTensor.from_local(local, self._mesh.tp, [Shard(dim)], run_check=False)
        return nn.Parameter(divided, requires_grad=self._trainable)

    def _shard(self) -> None:
        if self._mesh.shard_size == 1 and not self._trainable:
            return  # whole on this rank: FSDP2 would copy each layer before it computes
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # weights are stored in the compute dtype
        if self._trainable:
            computing, summing = (getattr(torch, each) for each in (self._setup.dtype, self._setup.config.reduce_dtype))
            policy = MixedPrecisionPolicy(computing, reduce_dtype=summing, cast_forward_inputs=False)
        keep, mesh = self._setup.config.reshard_after_forward, self._mesh.sharding
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=keep, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        modules = self._sharded_modules()
        for module in modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
        if self._setup.prefetch:  # in the backward pass, FSDP2 does it by itself
            for module, following in pairwise(modules):
                module.set_modules_to_forward_prefetch([following])

    def _shortage(self) -> Shortage | None:
        """Return None if a pass that runs out of memory ends the ranks.

        Trained weights are also reduced, and tp ranks wait for each other inside of layers.
        """
        if not RECOVERS or self._trainable or self._mesh.tp_size > 1:
            return None
        keeps = not self._setup.config.reshard_after_forward
        return Shortage(self._sharded_modules(), keeps_layers=keeps)

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _parts(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[ParameterShard]:
        """List this rank's shards: its chunk, along dimension 0 as in fully_shard, of its tp part of each tensor."""
        shards, shard = self._mesh.shard_size, self._mesh.shard_rank
        cuts = {
            f"{linear.module}.{kind}": linear.cut
            for linear in self.model.modules()
            if isinstance(linear, MultiLoraLinear) and linear.group is not None
            for kind in _KINDS
        } | (dict.fromkeys(_VOCABULARY, 0) if self._mesh.tp_size > 1 else {})
        for name, parameter in self.model.named_parameters():
            full = canonical_name(name)
            shape = shapes[full]
            cut = cuts.get(full)
            if cut == 1 and (full.endswith(".bias") or (full.endswith(".weight_scale") and shape[1] == 1)):
                cut = None  # whole on every tp rank
            first, last = self._range(shape[0]) if cut == 0 else (0, shape[0])
            chunk = -(-(last - first) // shards)
            start = min(first + shard * chunk, last)
            rows = slice(start, min(start + chunk, last))
            columns = slice(*self._range(shape[1])) if cut == 1 else None
            part = ParameterShard(full, parameter, shape, rows, columns, self._across_tp(cut))
            width = part.local.numel() // max(1, part.local.shape[0])
            assert part.local.shape[0] == rows.stop - rows.start, (full, part.local.shape, rows)
            assert len(shape) == 1 or columns is None or width == columns.stop - columns.start, full
            yield part

    def _across_tp(self, cut: int | None) -> Literal["divided", "alone", "partial"]:
        """Norms, and biases of row-parallel layers, see the heads or the tokens of their rank."""
        if cut is not None:
            return "divided"
        return "partial" if self._mesh.tp_size > 1 else "alone"

    def _range(self, size: int) -> tuple[int, int]:
        each = size // self._mesh.tp_size
        return self._mesh.tp_rank * each, (self._mesh.tp_rank + 1) * each

    def run(
        self, streams: Sequence[Stream], losses: LossTable, *, backward: bool
    ) -> tuple[list[torch.Tensor], list[Scores]]:
        """Pass streams through the model; see PackedModel.forward. All ranks must call this at the same time."""
        totals, scores = self.model(streams, losses, backward=backward)
        if self._trainable and not backward:  # weights that stay gathered would miss the next step
            for module in self._sharded_modules():
                module.reshard()
        return totals, scores

    def let_go(self) -> None:
        """Drop what passes have left: layers that stay gathered, and the adapters of the last one."""
        for sharded in self._sharded_modules():
            sharded.reshard()
        self.forget_adapters()

    def forget_adapters(self) -> None:
        """Drop the adapters of the last pass, and their gradients."""
        for module in self.model.modules():
            if isinstance(module, Adapters):
                module.factors = None

    @property
    def parameter_bytes(self) -> int:
        return sum(part.local.numel() * part.local.element_size() for part in self.parts)

    @property
    def total_bytes(self) -> int:
        return sum(torch.Size(part.shape).numel() * part.local.element_size() for part in self.parts)

    def loaded(self) -> Loaded:
        return Loaded(
            rank=dist.get_rank(),
            meta_only=self.all_meta,
            parameter_bytes=self.parameter_bytes,
            total_bytes=self.total_bytes,
            read_bytes=self.read_bytes,
        )

    def load(self, report: Report) -> None:
        """Read this rank's part of every tensor. Raises the errors of `WeightFiles`."""
        with WeightFiles(self._directory, framework="pt") as files, ExpertFiles(self._directory, files) as of_experts:
            for number, part in enumerate(self.parts):
                self._read(part, files, of_experts)
                report((number + 1) / len(self.parts))
            for name, (_, _, buffer) in self._in_files.items():
                buffer.copy_(files.whole(name, tuple(buffer.shape)))

    def _read(self, part: ParameterShard, files: WeightFiles, of_experts: ExpertFiles) -> None:
        if part.rows.start == part.rows.stop:
            return
        cut = (part.rows,) if part.columns is None else (part.rows, part.columns)
        if part.parameter.dtype == torch.int8:
            columns = part.columns or slice(0, part.shape[1])
            piece = torch.from_numpy(files.integers(part.name, part.shape, (part.rows, columns)))
        elif of_experts.has(part.name):
            piece = of_experts.part(part.name, part.shape, part.rows)
        else:
            piece = files.part(part.name, part.shape, cut)
        self.read_bytes += piece.numel() * piece.element_size()
        part.local.copy_(piece)


def _joined(
    layer: nn.Module, matrix: JoinedMatrix, shapes: Mapping[str, tuple[int, int]], index: int
) -> JoinedLoraLinear:
    """Return what replaces a joined matrix of a layer. Raise ConfigError as `_linear_of` does."""
    size = shapes[matrix.modules[0]][0], sum(shapes[path][1] for path in matrix.modules)
    linear = _linear_of(layer, matrix.path, size, f"model.layers.{index}.{matrix.path}", matrix.modules)
    return JoinedLoraLinear(linear, {f"model.layers.{index}.{path}": shapes[path][1] for path in matrix.modules})


def _linear_of(layer: nn.Module, path: str, size: tuple[int, int], module: str, mixers: Sequence[str]) -> nn.Linear:
    """Return a linear module that adapters train; `mixers`: those by which its layer mixes tokens.

    Raise ConfigError if the layer has none of that name and size.
    """
    found = dict(layer.named_modules()).get(path)
    if isinstance(found, nn.Linear) and (found.in_features, found.out_features) == size:
        return found
    linear = ", ".join(name for name, each in layer.named_modules() if isinstance(each, nn.Linear))
    shown = "none" if found is None else str(found)
    adapted = ", ".join(dict.fromkeys((*mixers, *MLP)))
    msg = (
        f"{module} should be a linear module from {size[0]} to {size[1]}, and is {shown}: the fsdp backend trains "
        f"adapters of {adapted}, or of experts in place of the MLP, and the linear modules of the model's layer are "
        f"{linear}"
    )
    raise ConfigError(msg)
