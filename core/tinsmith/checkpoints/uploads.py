"""Adapters on their way here, file by file, until they become checkpoints. Each tenant has a directory of its own.

So an upload of another tenant is found as little as one that does not exist.
"""

import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from tinsmith.checkpoints.atomic_directory import synchronise
from tinsmith.errors import NotFoundError, UserError
from tinsmith.operations import LoraConfig
from tinsmith_checkpoints.format import ADAPTER_CONFIG

FILES: Final = (ADAPTER_CONFIG, "adapter_model.safetensors")
MOST_OPEN: Final = 4
"""Uploads of one tenant that are not finished."""

_ANNOUNCED: Final = "announced.json"
_ID: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """What a tenant is going to upload."""

    tenant: str
    base_model: str
    lora: LoraConfig
    project_id: str | None
    created_at: datetime
    expires_at: datetime
    max_bytes: int  # of each file
    path: str | None = None  # of the checkpoint, once it is finished


def begin(root: Path, announced: Announced) -> str:
    """Return the id of a new upload. Raise UserError if the tenant has too many."""
    sweep(root, announced.created_at)
    own = root / _of_tenant(announced.tenant)
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    if sum(_read(each).path is None for each in _uploads_in(own)) >= MOST_OPEN:
        msg = f"at most {MOST_OPEN} uploads of one tenant may be open; finish one, or wait until it expires"
        raise UserError(msg)
    upload_id = secrets.token_hex(16)
    (own / upload_id).mkdir(mode=0o700)
    _write(own / upload_id, announced)
    return upload_id


def link_name(tenant: str, upload_id: str, file: str) -> str:
    """Return the name under which a link to a file of an upload is signed."""
    return f"uploads/{_of_tenant(tenant)}/{upload_id}/{file}"


def linked(root: Path, name: str) -> tuple[Path, Announced]:
    """Return the file that a signed name means. Raise NotFoundError if its upload is gone."""
    kind, _, rest = name.partition("/")
    own, _, rest = rest.partition("/")
    upload_id, _, file = rest.partition("/")
    if kind != "uploads" or file not in FILES or not _ID.fullmatch(own) or not _ID.fullmatch(upload_id):
        raise _gone(upload_id)
    directory = root / own / upload_id
    return directory / file, _read(directory)


def find(root: Path, tenant: str, upload_id: str) -> tuple[Path, Announced]:
    """Return one of the tenant's uploads. Raise NotFoundError if it has none of that id."""
    if not _ID.fullmatch(upload_id):
        raise _gone(upload_id)
    directory = root / _of_tenant(tenant) / upload_id
    return directory, _read(directory)


@contextmanager
def receiving(file: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `file` if the block succeeds."""
    try:
        descriptor, fresh = tempfile.mkstemp(prefix=".", dir=file.parent)
    except FileNotFoundError as error:
        raise _gone(file.parent.name) from error
    try:
        with os.fdopen(descriptor, "wb") as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
        Path(fresh).rename(file)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(fresh).unlink()
        raise


def finish(directory: Path, announced: Announced, path: str) -> None:
    """Remember the checkpoint for a repeated request, and remove the files."""
    _write(directory, replace(announced, path=path))
    for name in FILES:
        with suppress(FileNotFoundError):
            (directory / name).unlink()


def sweep(root: Path, now: datetime) -> None:
    """Remove uploads that have expired."""
    for own in root.iterdir() if root.is_dir() else ():
        for directory in _uploads_in(own):
            with suppress(NotFoundError):
                if _read(directory).expires_at < now:
                    shutil.rmtree(directory, ignore_errors=True)


def _uploads_in(own: Path) -> list[Path]:
    return [each for each in own.iterdir() if (each / _ANNOUNCED).exists()]


def _of_tenant(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def _read(directory: Path) -> Announced:
    try:
        return msgspec.json.decode((directory / _ANNOUNCED).read_bytes(), type=Announced)
    except FileNotFoundError as error:
        raise _gone(directory.name) from error


def _write(directory: Path, announced: Announced) -> None:
    fresh = directory / f".{_ANNOUNCED}.{secrets.token_hex(4)}"
    fresh.write_bytes(msgspec.json.encode(announced))
    synchronise(fresh)
    fresh.rename(directory / _ANNOUNCED)
    synchronise(directory)


def _gone(upload_id: str) -> NotFoundError:
    return NotFoundError(f"no upload {upload_id[:100]!r}; it may have expired")
