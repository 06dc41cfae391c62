"""The weights of a snapshot, tensor by tensor, for vLLM to load in place of those that it has.

Runs in vLLM's workers, like worker.py.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tinsmith_vllm.messages import ADAPTER, CHANGES, HEAD_WEIGHT, Changes

Weights = Iterable[tuple[str, torch.Tensor]]


def weights_of(base: Weights, source: Path | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights: the base model's, changed by an adapter; or a full model's own.

    `source` is a directory, or an adapter's memory.

    An adapter of the head of a tied model adds `HEAD_WEIGHT`, which the base model does not have.
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
        changes = waiting.pop(name, ())
        embedding = weight if name == found["embedding"] else embedding
        yield name, _changed(weight, adapter, changes, found["scale"]) if changes else weight
    if HEAD_WEIGHT in waiting and embedding is not None:
        yield HEAD_WEIGHT, _changed(embedding, adapter, waiting.pop(HEAD_WEIGHT), found["scale"])
    if waiting:
        msg = f"the base model has no {min(waiting)!r} ({len(waiting)} such), which the adapter changes"
        raise KeyError(msg)


def _changed(weight: torch.Tensor, adapter: Any, changes: Iterable[list[Any]], scale: float) -> torch.Tensor:
    changed = weight.to(torch.float32, copy=True)
    for *factors, part, transposed in changes:
        A, B = (_factor(adapter, *factors[side : side + 2]).to(weight.device) for side in (0, 2))
        product = scale * (B @ A)
        changed[tuple(map(_axis, part))] += product.T if transposed else product
    return changed


def _axis(entry: Any) -> Any:
    """Return what torch takes between brackets for an entry of a part."""
    if isinstance(entry, int):
        return entry
    if any(isinstance(each, list) for each in entry):
        return torch.cat([torch.arange(first, last) for first, last in entry])
    return slice(*entry)


def _factor(adapter: Any, name: str, index: int | None) -> torch.Tensor:
    found: torch.Tensor = adapter.get_tensor(name) if index is None else adapter.get_slice(name)[index]
    return found
