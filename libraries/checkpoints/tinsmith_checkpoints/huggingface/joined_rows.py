"""Tensors of base models that hold the rows of several modules which an adapter trains one by one."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinsmith_checkpoints.huggingface.decoder import ATTENTION, DELTA, MLP
from tinsmith_checkpoints.values import Json


@dataclass(frozen=True, slots=True)
class JoinedMatrix:
    """A matrix [out, in] that interleaves modules: in each group of rows, a number of rows of each module in turn.

    A module may come several times within a group. Its own rows are those of its first part in all groups, then those
    of its second.
    """

    path: str  # within a layer
    parts: tuple[tuple[str, int], ...]  # the paths of modules, and their rows in a group
    groups: int = 1

    @property
    def num_rows(self) -> int:
        return self.groups * self._stride

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(module for module, _ in self.parts))

    def rows_of(self, module: str) -> npt.NDArray[np.int64]:
        """Return where the module's rows lie."""
        starts, at = np.arange(self.groups)[:, None] * self._stride, 0
        found = []
        for name, size in self.parts:
            if name == module:
                found.append((starts + at + np.arange(size)).ravel())
            at += size
        return np.concatenate(found)

    @property
    def _stride(self) -> int:
        return sum(size for _, size in self.parts)


def joined_matrices(config: Mapping[str, Json]) -> tuple[JoinedMatrix, ...]:
    """Return the joined rows of a model's layers, given its config.json."""
    match next(iter(config.get("architectures") or ()), None):
        case "Phi3ForCausalLM":
            return _of_phi3(config)
        case "Qwen3NextForCausalLM":
            return _of_qwen3_next(config)
    return ()


def _of_phi3(config: Mapping[str, Json]) -> tuple[JoinedMatrix, ...]:
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    keys = head_dim * int(config.get("num_key_value_heads") or heads)
    queries, inner = head_dim * heads, int(config["intermediate_size"])
    return (
        JoinedMatrix("self_attn.qkv_proj", tuple(zip(ATTENTION[:3], (queries, keys, keys), strict=True))),
        JoinedMatrix("mlp.gate_up_proj", tuple((path, inner) for path in MLP[:2])),
    )


def _of_qwen3_next(config: Mapping[str, Json]) -> tuple[JoinedMatrix, ...]:
    """A group has the queries and keys of one key head, and all that belongs to its value heads."""
    groups = int(config.get("linear_num_key_heads", 16))
    heads = int(config.get("linear_num_value_heads", 32)) // groups
    key, value = int(config.get("linear_key_head_dim", 128)), heads * int(config.get("linear_value_head_dim", 128))
    qkv, z, b, a, _ = DELTA
    return (
        JoinedMatrix("linear_attn.in_proj_qkvz", ((qkv, key), (qkv, key), (qkv, value), (z, value)), groups),
        JoinedMatrix("linear_attn.in_proj_ba", ((b, heads), (a, heads)), groups),
    )
