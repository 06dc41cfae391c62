"""Encrypts files for recipients of age (age-encryption.org). It needs the package `pyrage`, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinsmith_checkpoints.errors import UnsupportedError, UserError

if TYPE_CHECKING:
    from pyrage.x25519 import Recipient

SUFFIX: Final = ".age"
_SHOWN_CHARS: Final = 100


def read_recipients(texts: Sequence[str]) -> list[Recipient]:
    """Parse public keys (age1...). Raise UserError naming one that is none, UnsupportedError if pyrage is missing."""
    try:
        import pyrage
    except ImportError as error:
        msg = (
            "age_encryption_recipients is not offered by this server, because the package pyrage is not installed "
            "there: pip install 'tinsmith[age]'; or export without encryption, over a connection you trust"
        )
        raise UnsupportedError(msg) from error
    found = []
    for text in texts:
        try:
            found.append(pyrage.x25519.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            msg = (
                f"age_encryption_recipients: {text[:_SHOWN_CHARS]!r} is no public key of age (X25519, age1...): {error}"
            )
            raise UserError(msg) from error
    return found


def encrypt_files(directory: Path, recipients: Sequence[str]) -> None:
    """Replace each file `name` by `name.age`, which any of the recipients can decrypt. Files are streamed."""
    keys = read_recipients(recipients)
    import pyrage

    for file in sorted(directory.iterdir()):
        pyrage.encrypt_file(str(file), str(file.with_name(file.name + SUFFIX)), keys)
        file.unlink()
