"""Download a model from the Hugging Face hub into this machine's cache, with `huggingface_hub`.

The library decides how: token, endpoint, cache, locks between processes, retries within a file. This module decides
what: configuration, tokenizer and safetensors files, but nothing that would run code when loaded. Complete files are
kept, so an interrupted download continues with the missing ones.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinsmith_checkpoints.errors import ConfigError, ServerError, TinsmithError
from tinsmith_checkpoints.huggingface.hub_cache import (
    HubReference,
    cache_directory,
    hub_endpoint,
    offline_message,
    repository_directory,
)
from tinsmith_checkpoints.huggingface.model_files import is_beside_the_weights
from tinsmith_checkpoints.huggingface.safetensors_files import shard_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_Progress = Callable[[str, float | None], None]  # gets the stage, and the fraction done, or None if unknown

_WORKERS: Final = 4  # files at a time
_PROGRESS_S: Final = 0.5  # between progress checks
_PROGRESS_STEPS: Final = 20  # each is one line if the output is not a terminal
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_PASSING: Final = (408, 425, 429)  # of the answers that blame the request
_FORBIDDEN: Final = (errno.EACCES, errno.EPERM, errno.EROFS)

_log = logging.getLogger(__name__)


def download_model(reference: HubReference, progress: _Progress) -> Path:
    """Download the missing files of a model, and return its directory.

    Raise ConfigError if the user must act, ServerError if trying again may help.
    """
    with _explained(reference):
        progress(f"asking {hub_endpoint()} for {reference}", None)
        repository = _look_up(reference)
        for file in repository.beside_the_weights():
            repository.fetch(file)
        weights = repository.weights()
        repository.forget_partial_files(weights)
        _check_space(repository, weights)
        _log.info("downloading %s from %s into %s", reference, hub_endpoint(), repository.directory)
        _fetch_all(repository, weights, progress)
        repository.remember_revision()
    return repository.directory


def download_size(reference: HubReference) -> int:
    """Ask the hub for the total size in bytes of a model's safetensors files. Raises the errors of `download_model`."""
    with _explained(reference):
        repository = _look_up(reference)
        repository.beside_the_weights()
        return sum(repository.size(file) for file in repository.files if fnmatch(file, "model*.safetensors"))


def _look_up(reference: HubReference) -> _Repository:
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would fill the log; `progress` reports instead
    info = HfApi().model_info(reference.name, revision=reference.revision, files_metadata=True)
    assert info.sha is not None
    return _Repository(reference, info.sha, {file.rfilename: file for file in info.siblings or ()})


@dataclass(frozen=True, slots=True)
class _Repository:
    """One commit of a repository on the hub, and its local copy."""

    reference: HubReference
    commit: str
    files: Mapping[str, RepoSibling]

    @property
    def directory(self) -> Path:
        return repository_directory(self.reference) / "snapshots" / self.commit

    def beside_the_weights(self) -> list[str]:
        """List configuration and tokenizer files. Raise ConfigError if this is not a model."""
        if "config.json" not in self.files:
            msg = f"{str(self.reference)!r} is not a model that can be served: its repository has no config.json"
            raise ConfigError(msg)
        found = filter(is_beside_the_weights, self.files)
        return sorted(file for file in found if not file.endswith(".bin.index.json"))

    def weights(self) -> list[str]:
        """List the weight files; the index must already be local. Raise ConfigError if there are no safetensors."""
        if "model.safetensors" in self.files:
            return ["model.safetensors"]
        files = [file.name for file in shard_files(self.directory, "model")]
        missing = [file for file in files if file not in self.files] if files else ["model.safetensors"]
        if missing:
            msg = (
                f"{str(self.reference)!r} cannot be served: its repository has no {missing[0]}, and tinsmith reads "
                "safetensors only; choose a model or a revision that has them"
            )
            raise ConfigError(msg)
        return files

    def fetch(self, file: str) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(self.reference.name, file, revision=self.commit)

    def remember_revision(self) -> None:
        """Record in the cache which commit the revision is. Called once all files are local."""
        from huggingface_hub import hf_hub_download

        hf_hub_download(self.reference.name, "config.json", revision=self.reference.revision)

    def size(self, file: str) -> int:
        return self.files[file].size or 0

    def num_present(self, file: str) -> int:
        """Return how many bytes of a file have arrived."""
        whole = self.directory / file
        if whole.exists():
            return self.size(file)
        return max((_size_of(partial) for partial in self._partial_files(file)), default=0)

    def forget_partial_files(self, files: Sequence[str]) -> None:
        """Remove leftovers of killed processes that none can continue, unless a live process is writing them."""
        locks = cache_directory() / ".locks" / repository_directory(self.reference).name
        for file in files:
            partial = [path for path in self._partial_files(file) if path.name != f"{self._blob(file)}.incomplete"]
            if partial and _is_free(locks / f"{self._blob(file)}.lock"):
                for path in partial:
                    path.unlink(missing_ok=True)

    def _partial_files(self, file: str) -> list[Path]:
        """List incomplete files. The library continues BLOB.incomplete, but never BLOB.RANDOM.incomplete."""
        blobs = repository_directory(self.reference) / "blobs"
        return list(blobs.glob(f"{self._blob(file)}*.incomplete"))

    def _blob(self, file: str) -> str:
        found = self.files[file]
        return found.lfs.sha256 if found.lfs is not None else str(found.blob_id)


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # the file has just been completed
        return 0


def _is_free(lock: Path) -> bool:
    """Return whether no process holds the library's lock for a file."""
    try:
        opened = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)  # the cache may be shared with other users: write nothing
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(opened)
    return True


def _check_space(repository: _Repository, files: Sequence[str]) -> None:
    wanted = sum(repository.size(file) - repository.num_present(file) for file in files)
    free = shutil.disk_usage(repository.directory).free
    if wanted > free:
        scale, unit = _unit(wanted)
        missing = f"{wanted / scale:.1f} {unit} are still to be downloaded, {free / scale:.1f} {unit} are free"
        raise ConfigError(_no_space(repository.reference, missing))


def _no_space(reference: HubReference, found: str) -> str:
    return (
        f"no space for {str(reference)!r} in {str(cache_directory())!r}: {found}; free some, or set HF_HOME to a "
        "directory on a larger disk"
    )


def _fetch_all(repository: _Repository, files: Sequence[str], progress: _Progress) -> None:
    total = sum(map(repository.size, files))
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="tinsmith-download") as pool:
        fetching = [pool.submit(repository.fetch, file) for file in files]
        try:
            while not _settled(fetching):
                _report(progress, sum(map(repository.num_present, files)), total)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for fetched in fetching:
            if not fetched.cancelled():
                fetched.result()


def _settled(fetching: Sequence[Future[None]]) -> bool:
    """Wait a moment. Return whether all files have arrived or one has failed."""
    done, waiting = wait(fetching, timeout=_PROGRESS_S, return_when=FIRST_EXCEPTION)
    return not waiting or any(fetched.exception() is not None for fetched in done)


def _report(progress: _Progress, done: int, total: int) -> None:
    step = max(1, total // _PROGRESS_STEPS)
    scale, unit = _unit(total)
    progress(f"downloading {done // step * step / scale:.1f} of {total / scale:.1f} {unit}", done / max(1, total))


def _unit(size: int) -> tuple[float, str]:
    return (1e9, "GB") if size >= 1e8 else (1e6, "MB")


@contextmanager
def _explained(reference: HubReference) -> Iterator[None]:
    """Turn the library's exceptions into errors that tell the user what to do."""
    if not hub_endpoint().startswith(("http://", "https://")):
        msg = f"HF_ENDPOINT {hub_endpoint()!r} is not a URL; set it to one such as https://huggingface.co, or unset it"
        raise ConfigError(msg)
    try:
        yield
    except TinsmithError:
        raise
    # Its HTTP client, and so the exception for a broken connection, depends on its version (requests, httpx, httpx2).
    except Exception as error:
        remedy = _remedy(reference, error)
        if remedy is not None:
            raise ConfigError(remedy) from error
        reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0].rstrip(".")
        msg = (
            f"the download of {str(reference)!r} from {hub_endpoint()} was interrupted: {reason}; check the network "
            "and HF_ENDPOINT, or give a directory that holds the model; files that are complete are kept"
        )
        raise ServerError(msg) from error


def _is_final(status: int) -> bool:
    return 400 <= status < 500 and status not in _PASSING


def _remedy(reference: HubReference, error: Exception) -> str | None:
    """Return what the user can do about an error, or None if the error may go away by itself."""
    from huggingface_hub import errors as hub

    name, endpoint = reference.name, hub_endpoint()
    account = "set HF_TOKEN, or run `hf auth login`, for an account that may read it"
    match error:
        case hub.GatedRepoError():
            return f"the model {name!r} is gated: ask for access at {endpoint}/{name}, and {account}"
        case hub.RepositoryNotFoundError():
            return (
                f"{name!r} is neither a local directory nor a model visible on {endpoint}: check the spelling; if "
                f"the model is private, {account}"
            )
        case hub.RevisionNotFoundError():
            return f"the model {name!r} has no revision {reference.revision!r}; see {endpoint}/{name}/branches"
        case hub.OfflineModeIsEnabled():
            return offline_message(reference)
        case hub.HfHubHTTPError() if error.response is not None and error.response.status_code in (401, 403):
            return f"{endpoint} refuses the token that reads {name!r}: {account}"
        case hub.HfHubHTTPError() if error.response is not None and _is_final(error.response.status_code):
            return (
                f"{endpoint} answers {error.response.status_code} to a request for {name!r}, and will again: check the "
                "name and HF_ENDPOINT, or give a directory that holds the model"
            )
        case OSError() if error.errno in _FULL:
            return _no_space(reference, "the disk is full")
        case OSError() if error.errno in _FORBIDDEN:
            return f"cannot write {error.filename!r}: {error.strerror}; set HF_HOME to a writable directory"
        case _:
            return None
