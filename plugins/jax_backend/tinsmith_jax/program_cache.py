"""The compiled programs on disk, each with a digest: they are code, and a disk or a power cut damages files."""

import hashlib
import logging
from typing import Final

from jax._src import compilation_cache, config  # no public API checks entries before they are loaded
from jax._src.lru_cache import LRUCache

logger = logging.getLogger(__name__)

_DIGEST_BYTES: Final = hashlib.sha256().digest_size


class VerifiedCache(LRUCache):
    """JAX's cache of programs. What does not match its digest is removed, and so compiled again.

    JAX writes in place, refuses what it cannot unpack but never replaces it, and unpacks most entries with flipped bits
    to other programs. Each file here ends with the digest of its key and program.
    """

    def get(self, key: str) -> bytes | None:
        stored = super().get(key)
        if stored is None:
            return None
        program = stored[:-_DIGEST_BYTES]
        if _digest(key, program) == stored[-_DIGEST_BYTES:]:
            return program
        (self._path / f"{key}-cache").unlink(missing_ok=True)
        logger.warning("removed the damaged compiled program %s from %s: it will be compiled again", key, self._path)
        return None

    def put(self, key: str, value: bytes) -> None:
        super().put(key, value + _digest(key, value))


def verify_programs() -> None:
    """Make JAX verify the programs that it reads. Call this before the first is compiled."""
    compilation_cache.get_file_cache = _open


def _open(path: str) -> tuple[VerifiedCache, str]:
    return VerifiedCache(path, max_size=config.compilation_cache_max_size.value), path


def _digest(key: str, program: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + program).digest()
