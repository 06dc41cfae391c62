"""The weights of a snapshot, tensor by tensor, for vLLM to load in place of those that it has.

Runs in vLLM's workers, like worker.py.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tinsmith_vllm.messages import ADAPTER, CHANGES, Changes

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Weights = Iterable[tuple[str, torch.Tensor]]


def weights_of(base: Weights, source: Path | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights: the base model's, changed by an adapter; or a full model's own.

    `source` is a directory, or an adapter's memory.

    An adapter of the head of a tied model adds `lm_head.weight`, which the base model does not have.
    """
    if source is None:
        yield from base
    elif not source.is_dir():
        with safe_open(source, framework="pt") as adapter:
            yield from _merged(base, adapter, json.loads(adapter.metadata()[CHANGES]))
    elif (source / CHANGES).exists():
        with safe_open(source / ADAPTER, framework="pt") as adapter:
            yield from _merged(base, adapter, json.loads((source / CHANGES).read_text(encoding="utf-8")))
    else:
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - no mapping
                    yield name, stored.get_tensor(name)


def _merged(base: Weights, adapter: Any, found: Changes) -> Iterator[tuple[str, torch.Tensor]]:
    waiting = dict(found["changes"])
    embedding = None
    for name, weight in base:
        change = waiting.pop(name, None)
        embedding = weight if name == EMBEDDING else embedding
        yield name, weight if change is None else _changed(weight, adapter, change, found["scale"])
    if (change := waiting.pop(HEAD, None)) is not None and embedding is not None:
        yield HEAD, _changed(embedding, adapter, change, found["scale"])
    if waiting:
        msg = f"the base model has no {min(waiting)!r} ({len(waiting)} such), which the adapter changes"
        raise KeyError(msg)


def _changed(weight: torch.Tensor, adapter: Any, change: list[Any], scale: float) -> torch.Tensor:
    A, B = (_factor(adapter, *change[side : side + 2]).to(weight.device) for side in (0, 2))
    return weight.float() + scale * (B @ A)


def _factor(adapter: Any, name: str, index: int | None) -> torch.Tensor:
    found: torch.Tensor = adapter.get_tensor(name) if index is None else adapter.get_slice(name)[index]
    return found
