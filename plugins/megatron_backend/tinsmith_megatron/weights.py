"""Reads this rank's part of the base model from the safetensors files: no rank reads, or ever holds, more."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tinsmith.huggingface import DecoderShape, WeightFiles
from tinsmith_megatron.linears import fuse
from tinsmith_megatron.messages import Setup
from tinsmith_megatron.parallel import Place, part_of
from tinsmith_megatron.stage import Stage

Report = Callable[[float], None]


class WeightReader:
    """Fills a stage. Raises the errors of `WeightFiles`."""

    def __init__(self, setup: Setup, place: Place) -> None:
        self._shape: DecoderShape = setup.architecture.shape
        self._directory = Path(setup.model_path)
        self._tp_size, self._place = setup.config.tensor_parallel, place
        self._part = part_of(place, setup.config, self._shape)
        self.read_bytes = 0

    @torch.no_grad()
    def fill(self, stage: Stage, report: Report) -> None:
        with WeightFiles(self._directory, framework="pt") as files:
            steps = list(self._steps(stage, files))
            for number, step in enumerate(steps):
                step()
                report((number + 1) / len(steps))

    def _steps(self, stage: Stage, files: WeightFiles) -> Iterator[Callable[[], None]]:
        shape = self._shape
        table = (shape.vocab_size, shape.hidden_size)
        if stage.is_first:
            yield lambda: self._copy(stage.embedding.weight, self._rows(files, "model.embed_tokens.weight", table))
        for layer in stage.decoder.layers:
            yield lambda layer=layer: self._fill_layer(layer, files)  # type: ignore[misc]  # mypy cannot infer it
        if stage.is_last:
            norm = stage.decoder.final_layernorm.weight
            yield lambda: self._copy(norm, self._whole(files, "model.norm.weight", (shape.hidden_size,)))
            if not (shape.tied and stage.is_first):
                name = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
                yield lambda: self._copy(stage.head, self._rows(files, name, table))

    def _fill_layer(self, layer: Any, files: WeightFiles) -> None:  # Any: Megatron's
        shape, prefix = self._shape, f"model.layers.{layer.layer_number - 1}"
        hidden, attention = shape.hidden_size, layer.self_attention
        sizes = {"q": shape.q_size, "k": shape.kv_size, "v": shape.kv_size}
        q, k, v = (
            self._rows(files, f"{prefix}.self_attn.{n}_proj.weight", (size, hidden)) for n, size in sizes.items()
        )
        groups = shape.num_kv_heads // self._tp_size
        self._copy(attention.linear_qkv.weight, fuse([part.T for part in (q, k, v)], groups).T)
        o = self._columns(files, f"{prefix}.self_attn.o_proj.weight", (hidden, shape.q_size))
        self._copy(attention.linear_proj.weight, o)
        norms = {"input_layernorm": layer.input_layernorm, "post_attention_layernorm": layer.pre_mlp_layernorm}
        for name, norm in norms.items():
            self._copy(norm.weight, self._whole(files, f"{prefix}.{name}.weight", (hidden,)))
        for name, norm in {"q_norm": attention.q_layernorm, "k_norm": attention.k_layernorm}.items():
            if isinstance(norm, torch.nn.RMSNorm):
                self._copy(norm.weight, self._whole(files, f"{prefix}.self_attn.{name}.weight", (shape.head_dim,)))
        (self._fill_mlp if shape.experts is None else self._fill_experts)(layer.mlp, f"{prefix}.mlp", files)

    def _fill_mlp(self, mlp: Any, prefix: str, files: WeightFiles) -> None:
        hidden, inner = self._shape.hidden_size, self._shape.intermediate_size
        both = [self._rows(files, f"{prefix}.{n}_proj.weight", (inner, hidden)) for n in ("gate", "up")]
        self._copy(mlp.linear_fc1.weight, torch.cat(both))
        self._copy(mlp.linear_fc2.weight, self._columns(files, f"{prefix}.down_proj.weight", (hidden, inner)))

    def _fill_experts(self, moe: Any, prefix: str, files: WeightFiles) -> None:
        assert self._shape.experts is not None
        hidden, inner = self._shape.hidden_size, self._shape.experts.intermediate_size
        router = self._whole(files, f"{prefix}.gate.weight", (self._shape.experts.num_experts, hidden))
        self._copy(moe.router.weight, router)
        for index, expert in enumerate(self._part.experts):
            own = f"{prefix}.experts.{expert}"
            both = [self._whole(files, f"{own}.{n}_proj.weight", (inner, hidden)) for n in ("gate", "up")]
            self._copy(moe.experts.gate_up[index], torch.cat(both))
            self._copy(moe.experts.down[index], self._whole(files, f"{own}.down_proj.weight", (hidden, inner)))

    def _own(self, size: int) -> slice:
        each = size // self._tp_size
        return slice(self._place.tp_rank * each, (self._place.tp_rank + 1) * each)

    def _rows(self, files: WeightFiles, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self._counted(files.part(name, shape, (self._own(shape[0]),)))

    def _columns(self, files: WeightFiles, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self._counted(files.part(name, shape, (slice(0, shape[0]), self._own(shape[1]))))

    def _whole(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._counted(files.whole(name, shape))

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.read_bytes += tensor.numel() * tensor.element_size()
        return tensor

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape, (target.shape, source.shape)
        target.copy_(source)
