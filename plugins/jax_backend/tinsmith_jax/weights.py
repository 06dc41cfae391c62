"""Load the frozen base model from a Hugging Face directory's safetensors as one pytree of stacked device arrays.

Every layer tensor is stacked over layers and stored [in, out]; attention projections are fused as q|k|v and the MLP's
as gate|up. Legend: L = layers, H = hidden, I = intermediate, V = vocabulary, d = head_dim, q = heads * d, kv = kv heads
* d.

    {"embed": [V, H], "head": [V, H] (the same buffer as embed if tied), "final_norm": [H],
     "layers": {"input_norm": [L, H], "qkv": [L, H, q + 2 kv], "q_norm", "k_norm": [L, d] (Qwen3 only),
                "o": [L, q, H], "post_norm": [L, H], "gate_up": [L, H, 2 I], "down": [L, I, H]}}
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16)
import numpy as np

from tinsmith import Array, Progress
from tinsmith.huggingface import WeightFiles
from tinsmith_jax.model_config import ModelConfig

# Any: a pytree of jax arrays; jax has no static type for one of a given structure.
Base = Any
Read = Callable[[str, tuple[int, ...]], Array]

# our name -> (Hugging Face modules, joined along `out`)
_MATRICES: Mapping[str, Sequence[str]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS: Mapping[str, str] = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
_QK_NORMS: Mapping[str, str] = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


def load_base(directory: Path, config: ModelConfig, dtype: str, progress: Progress) -> Base:
    """Read all weights as `dtype` and put them on the default device.

    Raise ConfigError for missing files or tensors, or wrong shapes.
    """
    with WeightFiles(directory, framework="numpy") as files:

        def read(name: str, shape: tuple[int, ...]) -> Array:
            tensor: Array = files.whole(name, shape)
            return tensor.astype(np.dtype(dtype), copy=False)

        return _assemble(read, config, progress)


def _assemble(read: Read, config: ModelConfig, progress: Progress) -> Base:
    shapes = config.linear_shapes()
    hidden, vocab = config.hidden_size, config.vocab_size
    norms = {name: (path, config.hidden_size) for name, path in _NORMS.items()}
    if config.qk_norm:
        norms |= {name: (path, config.head_dim) for name, path in _QK_NORMS.items()}
    done, total = 0, len(_MATRICES) + 1
    layers: dict[str, Any] = {}
    for name, modules in _MATRICES.items():
        progress("loading weights", done / total)
        layers[name] = jax.device_put(_stack_matrix(read, modules, shapes, config.num_layers))
        done += 1
    for name, (path, size) in norms.items():
        rows = [read(f"model.layers.{i}.{path}.weight", (size,)) for i in range(config.num_layers)]
        layers[name] = jax.device_put(np.stack(rows))
    progress("loading weights", done / total)
    embed = jax.device_put(np.ascontiguousarray(read("model.embed_tokens.weight", (vocab, hidden))))
    head = embed if config.tied else jax.device_put(np.ascontiguousarray(read("lm_head.weight", (vocab, hidden))))
    final_norm = jax.device_put(np.ascontiguousarray(read("model.norm.weight", (hidden,))))
    base = {"embed": embed, "head": head, "final_norm": final_norm, "layers": layers}
    for leaf in jax.tree.leaves(base):
        leaf.block_until_ready()
    progress("loading weights", 1.0)
    return base


def _stack_matrix(read: Read, modules: Sequence[str], shapes: Mapping[str, tuple[int, int]], num_layers: int) -> Array:
    widths = [shapes[module][1] for module in modules]
    stacked: Array | None = None
    for i in range(num_layers):
        offset = 0
        for module, width in zip(modules, widths, strict=True):
            d_in, d_out = shapes[module]
            tensor = read(f"model.layers.{i}.{module}.weight", (d_out, d_in))
            if stacked is None:
                stacked = np.empty((num_layers, d_in, sum(widths)), tensor.dtype)
            stacked[i, :, offset : offset + width] = tensor.T
            offset += width
    assert stacked is not None, "a model has at least one layer"
    return stacked
