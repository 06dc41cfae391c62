"""Makers of models and backends for the tests of the fsdp backend."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from tutorial_pages import written

from tinsmith import BUILTIN_LOSSES, BackendContext, Placement
from tinsmith.testing import TinyShape, write_tiny_model
from tinsmith_fsdp import backend
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_workers import MakeLauncher
from tinsmith_workers.testing import Nursery

VOCAB = 300
WORKBENCH = Path(__file__).parents[3] / "tools" / "workbench"
NOWHERE = Placement()
LOSSES = {spec.name: spec for spec in BUILTIN_LOSSES}


def shape(family: str, **changes: object) -> TinyShape:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "tied": family == "qwen3",
    }
    return TinyShape(family=family, **{**sizes, **changes})  # type: ignore[arg-type]  # checked by the class


def write_models(root: Path) -> Mapping[str, Path]:
    for family in ("qwen3", "llama"):
        write_tiny_model(root / family, shape(family))
    return {family: root / family for family in ("qwen3", "llama")}


@cache
def nursery() -> Nursery:
    """Torch and transformers take longer to import than most tests take. transformers imports its models when asked."""
    models = ("auto.configuration_auto", "qwen3.modeling_qwen3", "llama.modeling_llama")
    with pytest.MonkeyPatch.context() as patch:
        for place in (Path(__file__).parent, WORKBENCH, written("torch-backend")):
            patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        return Nursery(
            "tinsmith_fsdp.rank",
            "limited_rank",
            "sleepy_rank",
            "telling_rank",
            "tinsmith_hf.worker",
            *(f"transformers.models.{model}" for model in models),
        )


def fork_backend(
    directory: Path, cache_dir: Path, *, placement: Placement = NOWHERE, **settings: object
) -> FsdpBackend:
    """Make a backend whose ranks start at once. They are of telling_rank.py, or as patched."""
    with pytest.MonkeyPatch.context() as patch:
        if backend.PROGRAM == "tinsmith_fsdp.rank:Rank":
            patch.setattr(backend, "PROGRAM", "telling_rank:TellingRank")
        return make_backend(directory, cache_dir, nursery().launch, placement=placement, **settings)


def limited_backend(directory: Path, cache_dir: Path, **settings: object) -> FsdpBackend:
    """Make a backend whose ranks are of limited_rank.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith_fsdp.backend.PROGRAM", "limited_rank:LimitedRank")
        return fork_backend(directory, cache_dir, **settings)


def sleepy_backend(directory: Path, cache_dir: Path, **settings: object) -> FsdpBackend:
    """Make a backend whose ranks are of sleepy_rank.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith_fsdp.backend.PROGRAM", "sleepy_rank:SleepyRank")
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
) -> FsdpBackend:
    given = {"device": "cpu", "max_lora_rank": 16, "max_context_tokens": 128, "max_full_models": 6, **settings}
    config = FsdpConfig.model_validate(given)
    context = BackendContext(
        model_name="tiny", model_path=directory, cache_dir=cache_dir, losses=LOSSES, placement=placement
    )
    return FsdpBackend(config, context, launch_with)
