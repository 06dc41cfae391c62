"""Unix sockets in directories whose paths do not fit into an address."""

import os
import socket
from pathlib import Path

import pytest

from tinsmith.socket_paths import SocketDirectory

FOUND, MISSING = Path("/proc/self/fd"), Path("/no/such/directory")


@pytest.mark.parametrize("descriptors", [FOUND, MISSING], ids=["linux", "elsewhere"])
@pytest.mark.parametrize("length", [1, 50, 200, 255])
def test_a_socket_is_bound_and_found_by_its_own_path(tmp_path: Path, length: int, descriptors: Path) -> None:
    directory = tmp_path / "a directory" / ("d" * length)
    directory.mkdir(parents=True)
    name = "n" * 40
    with (
        SocketDirectory(directory, descriptors=descriptors) as ours,
        SocketDirectory(directory, descriptors=descriptors) as theirs,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        assert len(os.fsencode(ours.address(name))) <= 103
        listener.bind(ours.address(name))
        sender.sendto(b"here", theirs.address(name))
        assert listener.recv(10) == b"here"
        assert [each.name for each in directory.iterdir()] == [name]


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="d" * 200):
        SocketDirectory(tmp_path / ("d" * 200))


def test_nothing_stays_open_or_behind(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 200)
    directory.mkdir()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - their number
    for descriptors in (FOUND, MISSING):
        made = SocketDirectory(directory, descriptors=descriptors)
        place = Path(made.address("name")).parent
        made.close()
        assert not place.exists()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
