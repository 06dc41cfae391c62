"""Checks that the configured port is free, or names the process that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tinsmith.commands.doctor.finding import Finding
from tinsmith.settings import ServerSettings

_LISTENS: Final = "0A"  # in /proc/net/tcp


def check_port(server: ServerSettings, problem: str | None) -> Finding:
    """Say how the port is. `problem`: why the server cannot listen there."""
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
