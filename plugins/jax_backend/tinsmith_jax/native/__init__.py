"""The door to the kernels in C++, which compute dense models on a CPU. Nothing else of this folder is imported outside.

They compute what the JAX modules say, so readers of those need not come here. No jax before `load`: compiling takes
longer than importing jax, so it begins before.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinsmith.machine import find_compiler
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.model_config import Attention, ModelConfig, Norms
from tinsmith_jax.native import library
from tinsmith_jax.sampling_values import SamplingShape

if TYPE_CHECKING:
    from tinsmith_jax.native.sampling import Sampling
    from tinsmith_jax.native.training import Training

_BFLOAT16_COLUMNS: Final = 32
"""The kernels multiply in bfloat16 if the sizes of a model's matrices are multiples of this."""
_WIDENED_COLUMNS: Final = 16
"""Likewise for matrices that they widen to float32."""


def on_cpus(environment: Mapping[str, str]) -> bool:
    """Return whether jax is known to compute on CPUs: told so, or without any plugin."""
    return library.on_cpus(environment)


def begin(cache_dir: Path, environment: Mapping[str, str]) -> None:
    """Begin to compile them in a thread if they are missing, before jax is imported and if it computes on CPUs."""
    if library.begins_early(environment) and (compiler := find_compiler()) is not None:
        library.begin(_directory(cache_dir), compiler)


def load(cache_dir: Path) -> bool:
    """Load the kernels, and compile them first if they are missing. Return whether that worked."""
    from tinsmith_jax.native import loading

    return loading.load(_directory(cache_dir))


def loaded() -> bool:
    """Return whether this process has the kernels."""
    from tinsmith_jax.native import loading

    return loading.loaded()


def multiplies_bfloat16() -> bool:
    """Return whether the kernels are there, and this CPU has an instruction for products of bfloat16."""
    from tinsmith_jax.native import loading

    return loading.multiplies_bfloat16()


def suits(config: JaxConfig, shape: ModelConfig, dtype: str = "float32") -> bool:
    """Return whether the kernels sample such a model with these settings, on a CPU that has them.

    Where they do not train it, not in bfloat16, as XLA would round more than they do.
    """
    suited = config.mesh is None and _know(shape) and config.kernels != "reference"
    if dtype == "bfloat16":
        columns = (shape.hidden_size, shape.intermediate_size, shape.q_size, shape.kv_size)
        even = shape.vocab_size % 2 == 0 and not any(size % _BFLOAT16_COLUMNS for size in columns)
        suited = suited and even and trains(config, shape)
    return suited


def trains(config: JaxConfig, shape: ModelConfig) -> bool:
    """Return whether the kernels, if they sample such a model, train it as well; otherwise XLA does."""
    return not config.recompute and shape.delta is None


def _know(model: ModelConfig) -> bool:
    """Return whether the kernels have code for all that such a model computes."""
    recurs = model.delta is not None
    attending = [kind for kind in model.kinds if kind.delta is None]
    same = len(attending) == 1 and attending[0].attends and attending[0].window is None
    whole = all(kind.mlp for kind in model.kinds)
    angles = [len(kind.rope.inv_freq) for kind in attending if kind.rope is not None]
    rotates = bool(angles) and (recurs or 2 * angles[0] == model.head_dim)
    normed = Attention(qk_norm="head")
    attention = model.attention in ((replace(normed, gated=True),) if recurs else (Attention(), normed))
    norms = replace(model.norms, offset=0.0) if recurs else model.norms  # weights have it added already
    plain = norms == Norms() and model.activation == "silu" and not model.mlp_bias and model.logits_cap is None
    scales = {model.embedding_scale, model.residual_scale, model.logits_scale}
    mlp = model.experts is None and model.gated and not model.parallel
    return mlp and attention and same and whole and rotates and plain and scales == {1.0}


def widens(shape: ModelConfig) -> bool:
    """Return whether the kernels take a model's matrices in bfloat16 while they compute in float32."""
    columns = (shape.q_size, shape.kv_size, shape.hidden_size, shape.intermediate_size)
    return not any(size % _WIDENED_COLUMNS for size in columns)


def sampling_arithmetic(config: ModelConfig, shape: SamplingShape) -> "Sampling":
    """Return the arithmetic of sampling, in place of `decode.InJax`."""
    from tinsmith_jax.native.sampling import Sampling

    return Sampling(config, shape)


def training_arithmetic(config: ModelConfig, *, rounds: bool) -> "Training":
    """Return the arithmetic of training, in place of JAX's. `rounds`: they multiply in bfloat16."""
    from tinsmith_jax.native.training import Training

    return Training(config=config, rounds=rounds)


def _directory(cache_dir: Path) -> Path:
    return cache_dir / "native"
