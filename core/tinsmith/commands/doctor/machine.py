"""Checks of this machine: the installed packages, the port, the data directory; and the form of their reports."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Final, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tinsmith.errors import ConfigError
from tinsmith.host import NETWORK, file_system_of
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.durable_directory import ON_A_LOCAL_DISK, directory_faults, existing_part
from tinsmith.settings import DataDir, ServerSettings

_LITTLE: Final = 10e9  # bytes; a few checkpoints of an adapter, not one of a large model
_TOO_LITTLE: Final = 0.5e9
_ON_NETWORK: Final = "checkpoints need a server that keeps locks, renames and fsync, and a store on PostgreSQL"
_CAUTIONS: Final = dict.fromkeys(NETWORK, _ON_NETWORK) | {
    "9p": "it may not keep locks, and SQLite needs them; use a local disk",
    "tmpfs": "everything in it is lost at a reboot; use a disk",
    "ramfs": "everything in it is lost at a reboot; use a disk",
    "overlay": "it belongs to a container and is lost with it; mount a volume",
}
_LISTENS: Final = "0A"  # in /proc/net/tcp

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The subject, its state, and the remedy."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


# the installation


def check_installation(plugins: Plugins) -> Iterator[Finding]:
    """Compare the installed packages with the requirements of tinsmith and its plugins."""
    yield _python()
    broken = [row for row in plugins.report() if row.error]
    distributions = sorted({row.distribution for row in plugins.report() if row.distribution != "(this process)"})
    for distribution in distributions:
        yield from _packages(distribution)
    for row in broken:
        yield Finding(f"plugin {row.name}", "problem", str(row.error), "see `tinsmith plugins`")


def _python() -> Finding:
    wanted = SpecifierSet(metadata("tinsmith")["Requires-Python"])
    found = platform.python_version()
    if wanted.contains(found, prereleases=True):
        return Finding("python", "ok", found)
    return Finding("python", "problem", f"{found}; tinsmith needs {wanted}", "make an environment with such a Python")


def _packages(distribution: str) -> Iterator[Finding]:
    """Compare every requirement of a distribution that applies here; its extras are the user's choice."""
    try:
        wanted = [Requirement(text) for text in requires(distribution) or ()]
    except PackageNotFoundError:
        return
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    problems = [problem for each in wanted if (problem := _problem(distribution, each)) is not None]
    yield from problems
    if not problems:
        found = f"{version(distribution)}, its {len(wanted)} requirements are met"
        yield Finding(f"package {distribution}", "ok", found)


def _problem(distribution: str, wanted: Requirement) -> Finding | None:
    remedy = f"pip install '{wanted.name}{wanted.specifier}'"
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return Finding(f"package {wanted.name}", "problem", f"missing; {distribution} needs it", remedy)
    if wanted.specifier.contains(found, prereleases=True):
        return None
    return Finding(f"package {wanted.name}", "problem", f"{found}; {distribution} needs {wanted.specifier}", remedy)


# the port


def check_port(server: ServerSettings, problem: str | None) -> Finding:
    """Say whether the port is free, or who holds it. `problem`: why the server cannot listen there."""
    subject = f"port {server.port}"
    if problem is not None:
        holders = ", ".join(sorted(_holders(server.port)))
        return Finding(subject, "problem", problem, f"it is held by {holders}" if holders else "")
    return Finding(subject, "ok", f"free on {server.host}" if server.port else "a free one is picked")


def _holders(port: int) -> Iterator[str]:
    """Name the processes that listen on a port, as far as this user may see them. Linux only."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        try:
            if str(link.readlink()) in sockets:
                process = link.parent.parent
                yield f"process {process.name} ({(process / 'comm').read_text(encoding='utf-8').strip()})"
        except OSError:  # it has ended, or belongs to another user
            continue


def _listening(port: int) -> Iterator[str]:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            columns = line.split()
            if columns[3] == _LISTENS and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]


# the data directory


def check_data_directory(data_dir: DataDir, *, with_database: bool) -> Iterator[Finding]:
    """Test it for real, or its nearest parent if it does not exist yet.

    `with_database` means that it is to hold an SQLite database.
    """
    subject, existing = f"data directory {data_dir.root}", existing_part(data_dir)
    try:
        faults = directory_faults(data_dir)
    except ConfigError as error:
        yield Finding(subject, "problem", str(error))
        return
    for fault in faults:
        yield Finding(subject, "problem", fault, ON_A_LOCAL_DISK)
    if not faults:
        yield Finding(subject, "ok", "writable; keeps locks, fsync and renames")
    yield _space(subject, existing)
    yield from _file_system(subject, existing, with_database=with_database)


def _space(subject: str, directory: Path) -> Finding:
    free = shutil.disk_usage(directory).free
    found = f"{gigabytes(free)} free"
    if free >= _LITTLE:
        return Finding(subject, "ok", found)
    remedy = "free some, or choose a larger disk with --data-dir: checkpoints of a large model need many GB"
    return Finding(subject, "problem" if free < _TOO_LITTLE else "note", found, remedy)


def _file_system(subject: str, directory: Path, *, with_database: bool) -> Iterator[Finding]:
    kind = file_system_of(directory)
    if kind in NETWORK and with_database:
        remedy = "choose a directory on a local disk with --data-dir, or set store.url to a PostgreSQL database"
        yield Finding(subject, "problem", f"on {kind}, where SQLite is refused", remedy)
    elif kind in _CAUTIONS:
        yield Finding(subject, "note", f"on {kind}", _CAUTIONS[kind])
