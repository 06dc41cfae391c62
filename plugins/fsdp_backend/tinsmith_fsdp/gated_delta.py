"""Layers of transformers with the gated delta rule, for packed sequences.

Without kernels for GPUs, transformers computes the rule and its convolution by code that ignores where sequences end.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from tinsmith_checkpoints.huggingface import JoinedMatrix
from tinsmith_fsdp.streams import Stream
from tinsmith_workers.torch import causal_convolution, gated_delta

_OTHERS: Final = frozenset({"conv1d", "norm", "out_proj"})
_CHILDREN: Final = (
    _OTHERS | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"},  # of the modules that Qwen3.5 has
    _OTHERS | {"in_proj_qkvz", "in_proj_ba"},  # and Qwen3-Next
)


class PackedGatedDelta(nn.Module):
    """Takes the place of a module of transformers, with its weights, and computes each sequence by itself."""

    def __init__(self, module: Any, joined: Sequence[JoinedMatrix] = ()) -> None:
        """`module`: as `is_gated_delta` knows it. It cannot be used afterwards.

        `joined`: which of its matrices hold the rows of several modules. Each module gets a matrix of its own.
        """
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, child)
        for matrix in joined:
            whole = self.get_submodule(_last(matrix.path))
            delattr(self, _last(matrix.path))
            for path in matrix.modules:
                self.add_module(_last(path), _with_rows(whole, matrix, path))
        self.A_log, self.dt_bias = module.A_log, module.dt_bias
        self._key, self._value = module.head_k_dim, module.head_v_dim
        self._sizes = (module.key_dim, module.key_dim, module.value_dim)
        self._activation = ACT2FN[module.activation]

    def forward(self, hidden_states: torch.Tensor, *, stream: Stream, **_: Any) -> torch.Tensor:
        """Map [1, T, hidden] to [1, T, hidden]."""
        mixed, z, b, a = (self.get_submodule(f"in_proj_{name}")(hidden_states)[0] for name in ("qkv", "z", "b", "a"))
        weight = self.conv1d.weight.squeeze(1)  # type: ignore[union-attr, operator]  # a parameter
        mixed = self._activation(causal_convolution(mixed, weight, stream.positions_T))
        q, k, v = mixed.split(self._sizes, dim=-1)
        g = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias)
        q, k, v = q.unflatten(-1, (-1, self._key)), k.unflatten(-1, (-1, self._key)), v.unflatten(-1, (-1, self._value))
        out = gated_delta(q, k, v, g, b.sigmoid(), stream.bounds)
        normed = self.norm(out, z.view_as(out))  # type: ignore[operator]  # a module
        projected: torch.Tensor = self.out_proj(normed.flatten(1)[None])  # type: ignore[operator]  # a module
        return projected


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _with_rows(whole: nn.Module, matrix: JoinedMatrix, path: str) -> nn.Linear:
    """Return a module that has its own rows of a matrix."""
    assert isinstance(whole.weight, torch.Tensor)
    weight = whole.weight.detach()[torch.from_numpy(matrix.rows_of(path))]
    linear = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    return linear


def is_gated_delta(module: nn.Module) -> bool:
    """Return whether the module has the parts of Qwen3.5's or of Qwen3-Next's.

    What it computes with them, a probe compares.
    """
    children = {name for name, _ in module.named_children()}
    return children in _CHILDREN and {"A_log", "dt_bias"} <= dict(module.named_parameters(recurse=False)).keys()
