"""`tinsmith checkpoint import`: weights from elsewhere as checkpoints that a tenant's clients load and sample from."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from tinsmith.backend import ModelState
from tinsmith.checkpoints import saved as checkpoints
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import NotFoundError, ServerError, UnsupportedError, UserError
from tinsmith.operations import Array, LoraConfig
from tinsmith.store import CheckpointKind, CheckpointRecord, RequestStore
from tinsmith_checkpoints.huggingface.adapter_shapes import adapted_modules
from tinsmith_checkpoints.huggingface.peft_layout import SIDES
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors
from tinsmith_checkpoints.tools.adapters import adapter_of, complete
from tinsmith_checkpoints.tools.contents import Contents, open_contents
from tinsmith_checkpoints.tools.rewriting import written_anew

_KINDS: Final[tuple[CheckpointKind, ...]] = ("training", "sampler")

Progress = Callable[[str], None]
"""Called with a description of the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """The import of a directory for a tenant. `base_path` is the directory of the base model that the server serves."""

    contents: Contents
    name: str
    tenant: str
    base_model: str
    base_path: Path
    fill_missing: bool = False
    force: bool = False

    @property
    def model_id(self) -> str:
        """Imports have a training run's place in paths, and no run."""
        return f"imported:{self.tenant}:{self.name}"

    def path(self, kind: CheckpointKind) -> TinkerPath:
        return TinkerPath(model_id=self.model_id, kind=kind, name=self.name)


def state_of(request: Import) -> ModelState:
    """Read and check. Raise UnsupportedError or UserError naming everything that does not fit the base model."""
    base, contents = _base_tensors(request.base_path), request.contents
    if contents.manifest is not None:
        found = checkpoints.read_checkpoint(contents.directory.parent, contents.directory.name)
        if found.state.lora.rank:
            complete(found.state.lora, found.state.weights, base.shapes(), fill=False)
            return written_anew(found.state)  # else the importer's files would be the server's as well
        _check_model(contents.weights.shapes(), base.shapes())
        return found.state
    if contents.layout == "model":
        _check_model(contents.weights.shapes(), base.shapes())
        return ModelState(lora=LoraConfig(rank=0, seed=0), weights=contents.weights)
    lora, weights = adapter_of(contents)
    return _adapter_state(lora, weights, base, fill=request.fill_missing)


def announced_adapter(directory: Path, announced: LoraConfig, base_path: Path) -> ModelState:
    """Read and check a PEFT adapter of that rank, for the modules that its flags name. Missing ones have no effect.

    Raise UnsupportedError or UserError naming what does not fit.
    """
    try:
        lora, weights = adapter_of(open_contents(directory))
    except ServerError as error:  # the files are not the server's
        raise UserError(str(error)) from error
    if lora.rank != announced.rank:
        msg = f"the adapter has rank {lora.rank} (adapter_config.json), and lora_config says {announced.rank}"
        raise UserError(msg)
    for flag in ("train_attn", "train_mlp", "train_unembed"):
        if getattr(lora, flag) and not getattr(announced, flag):
            msg = f"the adapter has weights of modules that lora_config leaves out ({flag} is false); set {flag}"
            raise UserError(msg)
    lora = replace(announced, alpha=lora.alpha)
    return _adapter_state(lora, weights, _base_tensors(base_path), fill=True)


def largest_adapter_bytes(announced: LoraConfig, base_path: Path) -> int:
    """Return the size of the tensors of an adapter with all modules of the base model, in float32."""
    modules = adapted_modules(_base_tensors(base_path).shapes()).values()
    return sum(4 * prod(each.shape(side, announced.rank)) for each in modules for side in SIDES)


def _adapter_state(lora: LoraConfig, weights: Mapping[str, Array], base: StoredTensors, *, fill: bool) -> ModelState:
    weights = complete(lora, weights, base.shapes(), fill=fill)
    bad = [name for name, array in weights.items() if not np.isfinite(array).all()]
    if bad:
        msg = f"{len(bad)} tensors hold values that are not finite, such as {bad[0]!r}"
        raise UserError(msg)
    return ModelState(lora=lora, weights=weights)


def _base_tensors(base_path: Path) -> StoredTensors:
    base = StoredTensors.of(base_path, "model")
    if not base:
        msg = f"{str(base_path)!r} has neither model.safetensors nor shards of it"
        raise NotFoundError(msg)
    return base


async def run_import(request: Import, store: RequestStore, root: Path, progress: Progress) -> list[CheckpointRecord]:
    """Write a training and a sampler checkpoint below `root`, and make them known. The store must be open."""
    progress("reading")
    state = await asyncio.to_thread(state_of, request)
    records = []
    for kind in _KINDS:
        path = request.path(kind)
        known = await _known(store, str(path))
        if known is not None and not request.force:
            msg = f"{str(path)!r} already exists; choose another --name, or pass --force to replace it"
            raise UserError(msg)
        progress(f"writing {path}")
        now, directory = datetime.now(UTC), path.new_directory()
        write = partial(
            checkpoints.write_checkpoint,
            kind=kind,
            state=state,
            base_model=request.base_model,
            user_metadata={"imported_from": request.contents.directory.name},
            created_at=now,
            overwrite=False,
            model_path=request.base_path,
        )
        size = await asyncio.to_thread(write, root, directory)
        record = CheckpointRecord(
            path=str(path),
            model_id=request.model_id,
            tenant=request.tenant,
            kind=kind,
            base_model=request.base_model,
            lora=state.lora,
            created_at=now,
            size_bytes=size,
            directory=directory,
            step=state.step,
            user_metadata={"imported_from": request.contents.directory.name},
        )
        if known is not None:
            await store.delete_version(known)
        await store.add_checkpoint(record)
        if known is not None:
            await asyncio.to_thread(checkpoints.delete_checkpoint, root, known.directory)
        records.append(record)
    return records


async def _known(store: RequestStore, path: str) -> CheckpointRecord | None:
    try:
        return await store.get_checkpoint(path)
    except NotFoundError:
        return None


def _check_model(shapes: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> None:
    differing = sorted(name for name in {*shapes, *base} if shapes.get(name) != base.get(name))
    if differing:
        name = differing[0]
        msg = (
            f"this model is not of the base model's shape: {len(differing)} tensors differ, the first is {name!r} "
            f"({list(shapes[name]) if name in shapes else 'missing'}, in the base model "
            f"{list(base[name]) if name in base else 'missing'})"
        )
        raise UnsupportedError(msg)
