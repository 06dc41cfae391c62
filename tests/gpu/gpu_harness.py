"""What the tests share: the device, tiny models and operations, and how far results are apart.

`TINSMITH_GPU_TESTS=cpu` runs the same tests on a CPU, with stand-ins for what only a GPU has. That shows that the tests
run, before anyone has a GPU for them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tinsmith.backend import BackendContext, ModelState, TrainingBackend
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import (
    AdamParams,
    Array,
    CreateModel,
    Datum,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStep,
    OptimStepOutput,
)
from tinsmith.plugins.loading import Plugins

MODE: Final = os.environ.get("TINSMITH_GPU_TESTS", "cuda")
ON_CPU: Final = MODE == "cpu"
VOCAB: Final = 512
TENANTS: Final = (1, 4, 16)
ON_DEVICE: Final = {
    "device": "cpu" if ON_CPU else "cuda",
    "nproc_per_node": 1,
    "dtype": "bfloat16",
    "isolation": "fast",
    "activation_checkpointing": True,
    "max_batch_tokens": 2048,
}
"""Settings of the fsdp backend, with what a GPU has by default."""


@contextmanager
def made_backend(
    plugin: str, model: Path, cache_dir: Path, settings: Mapping[str, object], **context: Any
) -> Iterator[TrainingBackend]:
    """Make a backend as an engine does. `context`: more fields of BackendContext."""
    spec = Plugins.load().backends.get(plugin)
    losses = {loss.name: loss for loss in BUILTIN_LOSSES}
    given = BackendContext(model_name="tiny", model_path=model, cache_dir=cache_dir, losses=losses, **context)
    cache_dir.mkdir(parents=True, exist_ok=True)
    backend = spec.create(spec.config.model_validate(settings), given)
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def observed(model: Path, cache_dir: Path, **settings: object) -> Iterator[TrainingBackend]:
    """Make an fsdp backend whose ranks are of observed_rank.py."""
    program = "observed_rank:OnCpu" if ON_CPU else "observed_rank:ObservedRank"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith_fsdp.backend.PROGRAM", program)
        with made_backend("fsdp", model, cache_dir, {**ON_DEVICE, **settings}) as backend:
            yield backend


def datum(rng: np.random.Generator, length: int) -> Datum:
    tokens = rng.integers(0, VOCAB, length + 1)
    inputs: dict[str, Array] = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
    return Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)


def passes(models: Sequence[str], seed: int, tokens: int = 1500) -> list[ForwardBackward]:
    """Give each model its part of the tokens, in sequences of 20 to 400."""
    rng, made = np.random.default_rng(seed), []
    for model_id in models:
        left, data = tokens // len(models), list[Datum]()
        while left > 0:
            data.append(datum(rng, min(left, int(rng.integers(20, 400)))))
            left -= len(data[-1].tokens_T)
        made.append(ForwardBackward(model_id=model_id, data=tuple(data)))
    return made


def add_models(backend: TrainingBackend, models: Sequence[str], ranks: Sequence[int] = (8, 32)) -> None:
    """Create models whose weights are all random, so that every gradient is one."""
    for index, model_id in enumerate(models):
        backend.create_model(
            CreateModel(model_id=model_id, lora=LoraConfig(rank=ranks[index % len(ranks)], seed=index))
        )
        state, rng = backend.capture_state(model_id), np.random.default_rng(index)
        weights = {
            name: value + rng.normal(scale=0.02, size=value.shape).astype(np.float32)
            for name, value in sorted(state.weights.items())
        }
        backend.restore_state(model_id, ModelState(lora=state.lora, weights=weights))


def scored(backend: TrainingBackend, operations: Sequence[ForwardBackward]) -> list[Array]:
    """Run a pass of all together; return the logprobs of every sequence."""
    found = []
    for result in backend.forward_backward(operations):
        assert isinstance(result, ForwardBackwardOutput), result
        found += [outputs["logprobs"] for outputs in result.loss_fn_outputs]
    return found


def step(backend: TrainingBackend, models: Sequence[str]) -> None:
    adam = AdamParams(learning_rate=1e-3)
    for result in backend.optim_step([OptimStep(model_id=model_id, adam=adam) for model_id in models]):
        assert isinstance(result, OptimStepOutput), result


def gradient(backend: TrainingBackend, model_id: str) -> Array:
    """Return the whole pending gradient as one vector."""
    gradients = backend.capture_state(model_id).gradients
    return np.concatenate([value.ravel() for _, value in sorted(gradients.items())])


def relative(ours: Any, theirs: Any) -> float:
    """Return the L2 norm of the difference over that of the reference. Any: arrays of any framework, on the host."""
    a, b = (np.asarray(x, np.float64) for x in (ours, theirs))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def farthest(ours: Sequence[Array], theirs: Sequence[Array]) -> float:
    """Return the greatest absolute difference."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
