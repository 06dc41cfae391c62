"""`tinsmith checkpoint convert`, `export-peft` and `merge`: new directories from old ones, tensor by tensor."""

import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import numpy as np

from tinsmith_checkpoints import format as checkpoints
from tinsmith_checkpoints.errors import NotFoundError, ServerError, UnsupportedError, UserError
from tinsmith_checkpoints.huggingface import model_files as hf_files
from tinsmith_checkpoints.huggingface import peft_layout
from tinsmith_checkpoints.huggingface.adapter_deltas import deltas
from tinsmith_checkpoints.huggingface.decoder import HEAD
from tinsmith_checkpoints.huggingface.places import Place, weight_places
from tinsmith_checkpoints.huggingface.safetensors_files import DTYPES, ShardWriter, StoredTensors
from tinsmith_checkpoints.tools.adapters import adapter_of
from tinsmith_checkpoints.tools.contents import Contents
from tinsmith_checkpoints.values import Array, ModelState

_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = f"{HEAD}.weight"

Progress = Callable[[str], None]
"""Called with the name of each tensor before it is read."""


@contextmanager
def fresh_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """Let the block fill a directory that appears at `target` complete, or not at all.

    Raise UserError if `target` is not empty (unless `force`), or cannot be made.
    """
    target = target.absolute()
    if target.exists() and not target.is_dir():
        msg = f"{str(target)!r} is a file; name a directory"
        raise UserError(msg)
    if target.is_dir() and any(target.iterdir()) and not force:
        msg = f"{str(target)!r} already exists; choose another directory, or pass --force to replace it"
        raise UserError(msg)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    except OSError as error:
        msg = f"{str(target)!r} cannot be written: {error.strerror or error}"
        raise UserError(msg) from error
    try:
        yield fresh
        _put(fresh, target)
    except OSError as error:
        msg = f"{str(target)!r} cannot be written: {error.strerror or error}"
        raise ServerError(msg) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # gone already if all went well


def _put(fresh: Path, target: Path) -> None:
    for file in fresh.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    fresh.chmod(0o755)  # mkdtemp makes them private
    if target.exists():
        old = fresh.with_name(f"{fresh.name}.old")
        target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        fresh.rename(target)


def convert(
    contents: Contents, target: Path, *, dtype: str | None, shard_bytes: int, force: bool, progress: Progress
) -> None:
    """Write the weights anew in another dtype or shard size; a training checkpoint stays one, in the newest version.

    Raise UnsupportedError for another dtype than float32 of a checkpoint that is to be trained on.
    """
    if contents.manifest is not None:
        if dtype not in (None, "float32"):
            msg = (
                f"a {contents.manifest.kind} checkpoint is float32; export it first (export-peft, merge), and convert "
                "the export"
            )
            raise UnsupportedError(msg)
        _convert_own(contents, target, shard_bytes=shard_bytes, force=force, progress=progress)
        return
    with fresh_directory(target, force=force) as fresh:
        stem = "adapter_model" if contents.layout == "adapter" else "model"
        wanted = dtype or _dtype_of(contents.weights)
        _write_shards(fresh, stem, contents.weights, dtype=wanted, shard_bytes=shard_bytes, progress=progress)
        if contents.layout == "adapter":
            _single_file(fresh, stem)
            config = json.dumps(dict(contents.adapter_config), indent=2) + "\n"
            (fresh / checkpoints.ADAPTER_CONFIG).write_text(config, encoding="utf-8")
        else:
            hf_files.copy_model_files(contents.directory, fresh, dtype=wanted)


def _convert_own(contents: Contents, target: Path, *, shard_bytes: int, force: bool, progress: Progress) -> None:
    found = checkpoints.read(contents.directory)
    progress("all tensors")
    with fresh_directory(target, force=force) as fresh:
        checkpoints.write(
            fresh,
            checkpoints.checked(written_anew(found.state)),
            kind=found.kind,
            base_model=found.base_model,
            user_metadata=found.user_metadata,
            created_at=found.created_at,
            model_path=contents.directory if (contents.directory / "config.json").exists() else None,
            shard_bytes=shard_bytes,
        )


def written_anew(state: ModelState) -> ModelState:
    """Hide that the tensors lie in files, which would be taken over as they are."""
    return replace(
        state,
        weights=MappingProxyType(state.weights),
        adam_m=MappingProxyType(state.adam_m),
        adam_v=MappingProxyType(state.adam_v),
        gradients=MappingProxyType(state.gradients),
    )


def export_peft(
    contents: Contents,
    target: Path,
    *,
    base_model: str | None,
    force: bool,
    progress: Progress,
    head: Literal["lm_head", "unembed_tokens"] = "lm_head",
) -> None:
    """Write a directory that PEFT and vLLM load as it is; with the head `unembed_tokens`, tinker-cookbook's merge.

    Raise UnsupportedError for a full model.
    """
    if contents.layout == "model":
        msg = "this is a fully fine-tuned model, which has no adapter; it loads with transformers as it is"
        raise UnsupportedError(msg)
    lora, weights = adapter_of(contents)
    named = base_model or contents.base_model
    if named is None:
        msg = "the adapter does not name its base model; pass --base-model"
        raise UserError(msg)
    with fresh_directory(target, force=force) as fresh:
        for name in weights:
            progress(name)
        state = ModelState(lora=lora, weights=weights)
        if head == "lm_head":
            checkpoints.write_peft_adapter(fresh, state, base_model=named)
        else:
            checkpoints.write_adapter(fresh, state, base_model=named, head=peft_layout.TINKER_HEAD)


def merge(
    contents: Contents,
    base: Path,
    target: Path,
    *,
    dtype: str | None,
    shard_bytes: int,
    force: bool,
    progress: Progress,
) -> list[str]:
    """Write base weights plus adapter as a Hugging Face model; return the names of the tensors that changed.

    W + (alpha / r) * B @ A is computed in float32, then rounded once. A delta on a tied head unties it: the embedding
    stays as it was. Of a model that also sees, the language part changes.
    """
    if contents.layout == "model":
        msg = "this is a fully fine-tuned model already; there is nothing to merge"
        raise UnsupportedError(msg)
    lora, weights = adapter_of(contents)
    originals = StoredTensors.of(base, "model")
    if not originals:
        msg = f"{str(base)!r} has neither model.safetensors nor shards of it"
        raise NotFoundError(msg)
    changes = deltas({name: array.shape for name, array in weights.items()})
    config = hf_files.read_model_config(base)
    places = weight_places(config, originals.shapes())
    tied = bool(config.get("tie_word_embeddings"))
    sources = {name: name for name in originals}
    unties = _HEAD in changes and (tied or _HEAD not in places)
    if unties:
        embedding = places[_EMBEDDING]
        sources[_HEAD], places[_HEAD] = embedding.tensor, replace(embedding, tensor=_HEAD)
    if strange := sorted(changes.keys() - places.keys()):
        raise UserError(_strange(base, originals, strange))
    wanted = dtype or _dtype_of(originals)
    parts = defaultdict[str, list[str]](list)
    for name in changes:
        parts[places[name].tensor].append(name)
    with fresh_directory(target, force=force) as fresh:
        with ShardWriter(fresh, "model", sources, shard_bytes=shard_bytes, dtype=wanted) as writer:
            for name, source in sources.items():
                progress(name)
                array = originals[source]
                if name in parts:
                    array = array.copy()  # copied from the source, because a reader may share its memory
                for part in parts.get(name, ()):
                    _add(part, places[part], changes[part].factors(weights), lora.scale, array)
                writer.add(name, array)
        hf_files.copy_model_files(base, fresh, dtype=wanted, tied=False if unties else None)
    return sorted(parts)


def _strange(base: Path, originals: StoredTensors, names: Sequence[str]) -> str:
    if any(name.endswith("_blocks") for name in originals):
        return (
            f"the experts in {str(base)!r} are stored as MXFP4, which cannot be changed; convert them to bfloat16 first"
        )
    return f"the base model has no {names[0]!r} ({len(names)} such); is {str(base)!r} the right one?"


def _add(name: str, place: Place, factors: tuple[Array, Array], scale: float, array: Array) -> None:
    a, b = factors
    if (b.shape[0], a.shape[1]) != place.shape:
        msg = f"{name} of the base model is {list(place.shape)}, the adapter's {[b.shape[0], a.shape[1]]}"
        raise UserError(msg)
    place.add(np.float32(scale) * (b @ a), array)


def _write_shards(
    fresh: Path, stem: str, tensors: StoredTensors, *, dtype: str, shard_bytes: int, progress: Progress
) -> None:
    with ShardWriter(fresh, stem, tensors, shard_bytes=shard_bytes, dtype=dtype) as writer:
        for name in tensors:
            progress(name)
            writer.add(name, tensors[name])


def _single_file(fresh: Path, stem: str) -> None:
    """PEFT reads adapters from one file."""
    shards = sorted(fresh.glob(f"{stem}-*.safetensors"))
    if len(shards) > 1:
        msg = "an adapter is a single file; raise --shard-mb"
        raise UserError(msg)
    shards[0].rename(fresh / f"{stem}.safetensors")
    (fresh / f"{stem}.safetensors.index.json").unlink()


def _dtype_of(tensors: StoredTensors) -> str:
    """Name the dtype of most of the numbers."""
    sizes: dict[str, int] = {}
    for tensor in tensors.stored.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    most = max(sizes, key=lambda kind: sizes[kind])
    return next((name for name, (kind, _) in DTYPES.items() if kind == most), "float32")
