"""Machines of one network, each a network namespace of its own on this kernel, and links between them that can be cut.

A cut drops what two machines send each other without telling either, as a switch does that has lost power: each has
a wrong hardware address for the other. The network of this machine stays as it is, and everything is gone with the
process, however it ends.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import pytest
from campaign_stores import CampaignStore, on_postgres
from processes import NETWORK
from sqlalchemy.engine import make_url

from tinsmith.testing.postgres import Postgres, PostgresMissingError

P = ParamSpec("P")
T = TypeVar("T")

_NEW_NAMESPACES: Final = 0x4000_0000 | 0x0400_0000  # CLONE_NEWNET, CLONE_NEWUTS
_KERNEL: Final = ctypes.CDLL(None, use_errno=True)


class Machine:
    """A thread in namespaces of its own: what it starts is on this machine, and so are the sockets that it makes."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.0.{number}"
        self.hardware = f"02:00:00:00:00:{number:02x}"
        self._name = f"machine-{number}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name, initializer=self._leave)
        self.thread_id = self.run(threading.get_native_id)
        self.ip("link", "set", "lo", "up")

    @property
    def environ(self) -> dict[str, str]:
        """For a process that the launcher forks: be on this machine."""
        return {NETWORK: f"/proc/{os.getpid()}/task/{self.thread_id}/ns"}

    def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return self._thread.submit(call, *args, **options).result()

    def ip(self, *arguments: str) -> None:
        self.run(subprocess.run, ["ip", *arguments], check=True)

    def plug_into(self, switch: "Machine") -> None:
        port = f"to-{self._name}"
        own = ("name", "eth0", "address", self.hardware, "netns", str(self.thread_id))
        switch.ip("link", "add", port, "type", "veth", "peer", *own)
        switch.ip("link", "set", port, "master", "switch", "up")
        self.ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")

    def reach(self, other: "Machine", *, wrongly: bool = False) -> None:
        """Send what is for the other machine to its hardware address, or where nobody is."""
        hardware = "02:ff:ff:ff:ff:ff" if wrongly else other.hardware
        self.ip("neigh", "replace", other.address, "lladdr", hardware, "dev", "eth0", "nud", "permanent")

    def close(self) -> None:
        self._thread.shutdown()

    def _leave(self) -> None:
        if _KERNEL.unshare(_NEW_NAMESPACES):
            raise OSError(ctypes.get_errno(), "new namespaces")
        name = self._name.encode()
        if _KERNEL.sethostname(name, len(name)):
            raise OSError(ctypes.get_errno(), "sethostname")


class Network:
    """A switch, and machines as they are added."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._switch = Machine(next(self._numbers))
        self._switch.ip("link", "add", "switch", "type", "bridge")
        self._switch.ip("link", "set", "switch", "up")
        self._machines: list[Machine] = []

    def add(self) -> Machine:
        machine = Machine(next(self._numbers))
        machine.plug_into(self._switch)
        for other in self._machines:
            other.reach(machine)
            machine.reach(other)
        self._machines.append(machine)
        return machine

    @contextmanager
    def cut(self, one: Machine, other: Machine) -> Iterator[None]:
        for here, there in ((one, other), (other, one)):
            here.reach(there, wrongly=True)
        try:
            yield
        finally:
            for here, there in ((one, other), (other, one)):
                here.reach(there)

    def close(self) -> None:
        for machine in (*self._machines, self._switch):
            machine.close()


@contextmanager
def a_network() -> Iterator[Network]:
    """Skip the test where this user may not make one."""
    if (why := _why_not()) is not None:
        pytest.skip(why)
    network = Network()
    try:
        yield network
    finally:
        network.close()


def _why_not() -> str | None:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "a network of machines needs Linux with the programs `ip` (iproute2) and `unshare` (util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "ip", "link", "add", "switch", "type", "bridge"],
        check=False,
        capture_output=True,
        text=True,
    )
    return None if tried.returncode == 0 else f"a network of machines needs root: {tried.stderr.strip()}"


@contextmanager
def a_database(machine: Machine) -> Iterator[Postgres]:
    """Run PostgreSQL on a machine. Whoever reaches it is let in."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-pg-") as directory:
        Path(directory).chmod(0o755)  # it may run as another user
        admits = Path(directory) / "pg_hba.conf"
        admits.write_text("local all all trust\nhost all all all trust\n")
        database = Postgres(listen_addresses=machine.address, hba_file=str(admits))
        try:
            machine.run(database.__enter__)
        except PostgresMissingError as error:
            pytest.skip(str(error))
        try:
            yield database
        finally:
            database.__exit__(None, None, None)


def on_database(database: Postgres, machine: Machine, **options: str) -> CampaignStore:
    """Return a database of its own that other machines reach; `options` are those of libpq."""
    store = on_postgres(database)
    url = make_url(store.settings["store"]["url"]).set(host=machine.address, query=options)
    return replace(store, settings={"store": {**store.settings["store"], "url": url.render_as_string()}})
