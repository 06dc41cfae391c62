"""Makers of models and backends for the tests of the megatron backend."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tinsmith import BUILTIN_LOSSES, BackendContext, Datum, ForwardBackwardOutput, Placement
from tinsmith.testing import ModelDriver, TinyShape, random_experts, write_tiny_model
from tinsmith_megatron.backend import MegatronBackend
from tinsmith_megatron.config import MegatronConfig
from tinsmith_workers import MakeLauncher
from tinsmith_workers.testing import Nursery

VOCAB = 300
LOSSES = {spec.name: spec for spec in BUILTIN_LOSSES}
FAMILIES = ("qwen3", "llama", "qwen3_moe")
NOWHERE = Placement()


def shape(family: str, **changes: object) -> TinyShape:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 24 if family == "qwen3_moe" else 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "tied": family == "qwen3",
    }
    return TinyShape(family=family, **{**sizes, **changes})  # type: ignore[arg-type]  # checked by the class


def write_models(root: Path) -> Mapping[str, Path]:
    for family in FAMILIES:
        write_tiny_model(root / family, shape(family))
    return {family: root / family for family in FAMILIES}


@cache
def nursery() -> Nursery:
    """Megatron takes longer to import than most tests take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        return Nursery("tinsmith_megatron.rank", "tinsmith_megatron.megatron_here", "doomed_rank")


def fork_backend(
    directory: Path, cache_dir: Path, *, placement: Placement = NOWHERE, **settings: object
) -> MegatronBackend:
    """Make a backend whose ranks start at once."""
    return make_backend(directory, cache_dir, nursery().launch, placement=placement, **settings)


def doomed_backend(directory: Path, cache_dir: Path, **settings: object) -> MegatronBackend:
    """Make a backend whose ranks are of doomed_rank.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith_megatron.backend.PROGRAM", "doomed_rank:DoomedRank")
        return fork_backend(directory, cache_dir, **settings)


@contextmanager
def forking() -> Iterator[None]:
    """Start the ranks of all backends that are made until the block ends by forking."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith_workers.group.launcher", lambda _: nursery().launch)
        yield


def make_backend(
    directory: Path,
    cache_dir: Path,
    launch_with: MakeLauncher | None = None,
    *,
    placement: Placement = NOWHERE,
    **settings: object,
) -> MegatronBackend:
    given = {"device": "cpu", "max_lora_rank": 16, "max_context_tokens": 128, **settings}
    context = BackendContext(
        model_name="tiny", model_path=directory, cache_dir=cache_dir, losses=LOSSES, placement=placement
    )
    return MegatronBackend(MegatronConfig.model_validate(given), context, launch_with)


def partly_replayed(driver: ModelDriver, data: Sequence[Datum]) -> list[Datum]:
    """Give experts to sequences of a model that has some: to every second one whole, to the others half-way."""
    allowed = driver.capabilities.replayed_experts
    if allowed is None:
        return list(data)
    lengths = [len(datum.tokens_T) // (1 + index % 2) for index, datum in enumerate(data)]
    experts = [random_experts(index, length, allowed) for index, length in enumerate(lengths)]
    return [replace(datum, routed_experts=each) for datum, each in zip(data, experts, strict=True)]


def experts_metrics(output: ForwardBackwardOutput) -> dict[str, float]:
    return {name: value for name, value in output.metrics.items() if name.startswith("e_")}
