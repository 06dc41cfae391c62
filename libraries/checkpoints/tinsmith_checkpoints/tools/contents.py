"""The contents of a directory: a checkpoint of ours, a PEFT adapter, or a Hugging Face model. Reads no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from tinsmith_checkpoints import format as checkpoints
from tinsmith_checkpoints.errors import UserError
from tinsmith_checkpoints.format import Manifest
from tinsmith_checkpoints.huggingface.outside_files import read_json
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensors
from tinsmith_checkpoints.values import Json

Layout = Literal["adapter", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """`manifest` is None unless tinsmith wrote the files; `adapter_config` is PEFT's, empty for a whole model."""

    directory: Path
    layout: Layout
    manifest: Manifest | None
    adapter_config: Mapping[str, Json]
    weights: StoredTensors
    optimizer: StoredTensors = field(default_factory=lambda: StoredTensors({}))
    gradients: StoredTensors = field(default_factory=lambda: StoredTensors({}))

    @property
    def kind(self) -> str:
        """Say what it is, in words."""
        what = "adapter" if self.layout == "adapter" else "full model"
        if self.manifest is None:
            return f"{'PEFT' if self.layout == 'adapter' else 'Hugging Face'} {what}"
        return f"{self.manifest.kind} checkpoint, {what}"

    @property
    def base_model(self) -> str | None:
        if self.manifest is not None:
            return self.manifest.base_model
        named = self.adapter_config.get("base_model_name_or_path")
        return str(named) if named else None


def open_contents(directory: Path) -> Contents:
    """Raise UserError if it is none of these, ServerError naming the file if it is damaged."""
    if not directory.is_dir():
        msg = f"{str(directory)!r} is not a directory"
        raise UserError(msg)
    manifest = checkpoints.read_manifest(directory) if (directory / checkpoints.MANIFEST).exists() else None
    adapter = (directory / checkpoints.ADAPTER_CONFIG).exists()
    if not adapter and not (directory / "config.json").exists() and manifest is None:
        msg = (
            f"{str(directory)!r} holds no checkpoint: neither {checkpoints.MANIFEST}, nor "
            f"{checkpoints.ADAPTER_CONFIG}, nor config.json"
        )
        raise UserError(msg)
    weights = StoredTensors.of(directory, "adapter_model" if adapter else "model")
    if not weights:
        msg = f"{str(directory)!r} has neither {'adapter_model' if adapter else 'model'}.safetensors nor shards of it"
        if (directory / "adapter_model.bin").exists() or list(directory.glob("pytorch_model*.bin")):
            msg += "; pickled weights (.bin) are not read: save them as safetensors"
        raise UserError(msg)
    return Contents(
        directory=directory,
        layout="adapter" if adapter else "model",
        manifest=manifest,
        adapter_config=_read_json(directory / checkpoints.ADAPTER_CONFIG) if adapter else {},
        weights=weights,
        optimizer=StoredTensors.of(directory, "optimizer"),
        gradients=StoredTensors.of(directory, "gradients"),
    )


def described(contents: Contents) -> dict[str, Json]:
    """Return everything that `show` tells."""
    manifest = contents.manifest
    lora: dict[str, Any] | None = None
    if manifest is not None:
        lora = msgspec.to_builtins(manifest.lora)
    elif contents.layout == "adapter":
        lora = {"rank": contents.adapter_config.get("r"), "alpha": contents.adapter_config.get("lora_alpha")}
    return {
        "directory": str(contents.directory),
        "kind": contents.kind,
        "format_version": None if manifest is None else manifest.format_version,
        "base_model": contents.base_model,
        "lora": lora,
        "target_modules": contents.adapter_config.get("target_modules"),
        "step": None if manifest is None else manifest.step,
        "created_at": None if manifest is None else manifest.created_at.isoformat(),
        "user_metadata": {} if manifest is None else manifest.user_metadata,
        "files": _files(contents),
        "tensors": {
            what: {
                name: {"dtype": each.dtype, "shape": list(each.shape), "bytes": each.num_bytes, "file": each.file.name}
                for name, each in tensors.stored.items()
            }
            for what, tensors in (
                ("weights", contents.weights),
                ("optimizer", contents.optimizer),
                ("gradients", contents.gradients),
            )
        },
    }


def _files(contents: Contents) -> dict[str, dict[str, Json]]:
    known = {} if contents.manifest is None else contents.manifest.files
    return {
        file.name: {
            "size": file.stat().st_size,
            "sha256": known[file.name].sha256 if file.name in known else None,
        }
        for file in sorted(contents.directory.iterdir())
        if file.is_file()
    }


def _read_json(file: Path) -> dict[str, Json]:
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        msg = f"{file.name} cannot be read: {error}"
        raise UserError(msg) from error
    if not isinstance(content, dict):
        msg = f"{file.name} holds no JSON object"
        raise UserError(msg)
    return content
