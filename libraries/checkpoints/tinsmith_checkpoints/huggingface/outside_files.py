"""Reading files that strangers may have made: regular files only, and JSON of bounded size and depth."""

import json
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Final

from tinsmith_checkpoints.errors import ConfigError
from tinsmith_checkpoints.values import Json

MAX_JSON: Final = 32_000_000  # bytes: parsed, they may take some twenty times as many
_MAX_DEPTH: Final = 64
_POINTER: Final = b"version https://git-lfs"
_POINTER_SIZE: Final = re.compile(rb"\nsize ([0-9]{1,20})\n")
_POINTER_BYTES: Final = 512  # more than any has
_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKETS: Final = re.compile(rb"[\[\]{}]")


def open_regular(file: Path) -> BufferedReader:
    """Open a file for reading. Raise OSError if it is none, such as a FIFO, which would wait for a writer."""
    opened = open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        msg = f"{file.name} is not a regular file"
        raise OSError(msg)
    return opened


def pointer_fault(file: Path) -> str | None:
    """Return why a file is not what its name says: it is empty, or stands for one that Git LFS has not fetched.

    Raise OSError if it cannot be read.
    """
    with open_regular(file) as opened:
        return _pointer_fault(opened.read(_POINTER_BYTES))


def _pointer_fault(start: bytes) -> str | None:
    if not start:
        return "is empty"
    if not start.startswith(_POINTER):
        return None
    size = _POINTER_SIZE.search(start)
    whole = f"a file of {size[1].decode()} bytes" if size is not None else "the file"
    return f"is a pointer of Git LFS in the place of {whole}: run `git lfs pull` there"


def read_regular(file: Path) -> bytes:
    """Read a file. Raise OSError if it cannot be read, or is none."""
    with open_regular(file) as opened:
        return opened.read()


def read_json(file: Path) -> Json:
    """Parse a file. Raise OSError, or ValueError if it is not JSON, too large or nested too deeply."""
    with open_regular(file) as opened:
        if os.fstat(opened.fileno()).st_size > MAX_JSON:
            msg = f"it is larger than {MAX_JSON} bytes"
            raise ValueError(msg)
        content = opened.read()
    if (fault := _pointer_fault(content[:_POINTER_BYTES])) is not None:
        msg = f"it {fault}"
        raise ValueError(msg)
    return parse_json(content)


def read_optional_object(file: Path) -> dict[str, Json]:
    """Parse a file that may be missing; what is no object holds nothing. Raise ConfigError if it cannot be read."""
    try:
        parsed = read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        msg = f"{str(file)!r} cannot be read as JSON: {error}"
        raise ConfigError(msg) from error
    return parsed if isinstance(parsed, dict) else {}


def parse_json(content: bytes) -> Json:
    """Parse JSON. Raise ValueError if it is none or nested too deeply."""
    check_depth(content)
    return json.loads(content)


def check_depth(content: bytes) -> None:
    """Raise ValueError if JSON is nested too deeply for a parser that recurses."""
    depth = 0
    for bracket in _BRACKETS.finditer(_STRINGS.sub(b"", content)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > _MAX_DEPTH:
            msg = f"it is nested more than {_MAX_DEPTH} deep"
            raise ValueError(msg)
