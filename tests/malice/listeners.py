"""The sockets at which processes listen, and who may connect to them."""

import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM

import psutil

_ACCEPTS = 0x10000  # __SO_ACCEPTCON, in the flags of /proc/net/unix


@dataclass(frozen=True, slots=True)
class Listener:
    command: str
    address: str
    """`host:port`, `udp host:port`, or `unix:` and a path; the path of an abstract socket begins with `@`."""

    is_private: bool
    """Reached from this machine alone; a socket in the file system, by its user alone."""


def own_address() -> str | None:
    """Return an IPv4 address of this machine that others reach."""
    addresses = [each for interface in psutil.net_if_addrs().values() for each in interface if each.family == AF_INET]
    return next((each.address for each in addresses if not ip_address(each.address).is_loopback), None)


def tree(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants, whatever their sessions."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def listeners(processes: Sequence[psutil.Process]) -> list[Listener]:
    found: list[Listener] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            found += [*_internet(process), *_unix(process)]
    return found


def _internet(process: psutil.Process) -> Iterator[Listener]:
    for each in process.net_connections("inet"):
        udp = each.type == SOCK_DGRAM
        if each.status == psutil.CONN_LISTEN or (udp and each.laddr and not each.raddr):
            address = f"{'udp ' if udp else ''}{each.laddr.ip}:{each.laddr.port}"
            yield Listener(_command(process), address, ip_address(each.laddr.ip.removeprefix("::ffff:")).is_loopback)


def _unix(process: psutil.Process) -> Iterator[Listener]:
    inodes = set()
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split(maxsplit=7)
        if inode in inodes and int(flags, 16) & _ACCEPTS:
            name = path[0] if path else ""
            yield Listener(_command(process), f"unix:{name}", _of_one_user(Path(name)))


def _of_one_user(path: Path) -> bool:
    """Connecting takes the right to write to the socket, and to pass through its directories."""
    if not path.is_absolute():  # an abstract socket has no rights
        return False
    if not path.exists() or not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return True
    return any(not parent.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH) for parent in path.parents)


def _command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())[:120]
