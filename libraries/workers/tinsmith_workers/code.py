"""Which code a process runs: a digest of the source of a package, because versions do not tell two checkouts apart."""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_SOURCE: Final = frozenset({".py", ".cc", ".h"})


def code_of(*packages: str) -> Mapping[str, str]:
    """Return a digest for each package that is installed."""
    found = {name: _digest(name) for name in packages}
    return {name: digest for name, digest in found.items() if digest is not None}


def code_of_plugins() -> Mapping[str, str]:
    """Return a digest for tinsmith and for each package with a plugin: any of them may hold a worker's program."""
    plugins = {package_of(each.value) for each in entry_points(group="tinsmith")}
    return code_of("tinsmith", *sorted(plugins))


def package_of(place: str) -> str:
    """Return the top-level package of "package.module:name"."""
    return place.partition(":")[0].partition(".")[0]


@cache
def _digest(package: str) -> str | None:
    spec = find_spec(package)
    if spec is None:
        return None
    found = hashlib.sha256()
    for root in map(Path, spec.submodule_search_locations or []):
        for file in sorted(path for path in root.rglob("*") if path.suffix in _SOURCE and path.is_file()):
            found.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
            found.update(file.read_bytes())
    if spec.submodule_search_locations is None and spec.origin is not None:  # one file
        found.update(Path(spec.origin).read_bytes())
    return found.hexdigest()
