"""Where workers join: a listening socket, and the check of everyone who connects to it."""

import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Final

from tinsmith.errors import ConfigError
from tinsmith.socket_paths import SocketDirectory
from tinsmith_workers.channel import Channel, ready
from tinsmith_workers.messages import Hello, Refused

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.2
_SHOWN: Final = 12  # characters of a digest
_GREETING_S: Final = 10.0  # for the proof of the key and the first message
_MAX_GREETED: Final = 64  # at a time; the oldest makes room


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker that has the key, and runs the code of this process."""

    channel: Channel
    hello: Hello

    @property
    def host(self) -> str:
        return self.hello.host

    @property
    def pid(self) -> int:
        return self.hello.pid

    @property
    def index(self) -> int | None:
        return self.hello.index

    @property
    def meeting(self) -> tuple[str, int]:
        return self.hello.meeting


class FrontDoor:
    """Open until it is closed."""

    def __init__(self, control_address: str | None, path: Path, key: bytes, code: Mapping[str, str]) -> None:
        """Listen at "host:port", or if that is None at a socket in the file system that this user alone can reach.

        code: the digests of packages that workers must have, too.
        """
        self._key = key
        self._code = code
        self._listener, self.address = _listen(control_address, path)
        self._arrived: queue.SimpleQueue[Joined] = queue.SimpleQueue()
        self._greeted: dict[Channel, None] = {}  # the oldest first
        self.refusals: list[str] = []
        self._joined: list[Joined] = []
        self._closed = False
        self._lock = threading.Lock()  # a new connection is either seen by `close`, or finds the door closed
        self._thread = threading.Thread(target=self._accept, name="front-door", daemon=True)
        self._thread.start()

    def joining(self, num_workers: int | None) -> Iterator[tuple[Sequence[Joined], int | None]]:
        """Yield who has joined, and how many are wanted if that is known: at each arrival, and now and then.

        A worker that dies is forgotten: it may be started again. So is one whose index another claims later: its host
        may have lost power.
        """
        while True:
            with suppress(queue.Empty):
                self._take(self._arrived.get(timeout=_POLL_S))
            self._forget_the_dead()
            wanted = num_workers or next((each.hello.num_workers for each in self._joined), None)
            yield tuple(self._joined), wanted

    def close(self, *, keep: Sequence[Joined] = ()) -> None:
        """Refuse new connections from now on, and close those that have joined unless they are to be kept."""
        with self._lock:
            self._closed = True
        self._thread.join()
        self._listener.close()
        while not self._arrived.empty():
            self._joined.append(self._arrived.get())
        for each in self._joined:
            if each not in keep:
                each.channel.close()
        self._joined.clear()

    def _take(self, arrived: Joined) -> None:
        for before in [each for each in self._joined if each.index is not None and each.index == arrived.index]:
            logger.warning("worker %d of %s replaces the one of %s", arrived.index, arrived.host, before.host)
            self._joined.remove(before)
            before.channel.close()
        self._joined.append(arrived)

    def _forget_the_dead(self) -> None:
        """A worker that has joined sends nothing until it is welcomed, so only an end can arrive."""
        for place in reversed(ready([each.channel for each in self._joined], 0)):
            self._joined.pop(place).channel.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                self._accept_one()
            except TimeoutError:
                continue
            except (OSError, RuntimeError) as error:  # for want of files or threads
                logger.warning("a worker cannot be let in now: %s", error)
                time.sleep(_POLL_S)

    def _accept_one(self) -> None:
        peer, _ = self._listener.accept()
        try:
            peer.setblocking(True)  # noqa: FBT003 - the standard library's own
            threading.Thread(target=self._greet, args=(Channel(peer),), name="greeting", daemon=True).start()
        except BaseException:
            peer.close()
            raise

    def _greet(self, channel: Channel) -> None:
        """Wrong keys and broken connections are dropped: strangers must not keep workers from joining."""
        with self._lock:
            if len(self._greeted) == _MAX_GREETED:
                next(iter(self._greeted)).hang_up()
            self._greeted[channel] = None
        limit = threading.Timer(_GREETING_S, channel.hang_up)
        try:
            limit.start()
            channel.prove(self._key, "engine")
            hello = channel.receive()
        except (AuthenticationError, EOFError, OSError):
            hello = None
        except Exception:  # it has the key, so this is no stranger
            logger.exception("the first message of a worker cannot be read: install the same version of tinsmith there")
            hello = None
        finally:
            limit.cancel()
            with self._lock:
                del self._greeted[channel]
        self._answer(channel, hello)

    def _answer(self, channel: Channel, hello: object) -> None:
        if not isinstance(hello, Hello):
            channel.close()
        elif (fault := _fault(hello, self._code)) is not None:
            self._refuse(channel, fault)
        else:
            self._arrive(Joined(channel, hello))

    def _arrive(self, worker: Joined) -> None:
        with self._lock:
            if self._closed:
                worker.channel.close()
            else:
                self._arrived.put(worker)

    def _refuse(self, channel: Channel, msg: str) -> None:
        logger.warning("%s", msg)
        self.refusals = [*(each for each in self.refusals if each != msg), msg]
        with suppress(OSError):
            channel.send(Refused(msg))
        channel.close()


def _fault(hello: Hello, code: Mapping[str, str]) -> str | None:
    """Return why the worker cannot work with this process."""
    if hello.version != version("tinsmith"):
        return (
            f"the worker on {hello.host} has tinsmith {hello.version}, and this machine has {version('tinsmith')}: "
            "install the same version on both"
        )
    found: Mapping[str, str] = getattr(hello, "code", {})  # missing if its code is older than that attribute
    for package, digest in code.items():
        # Workers tell the digests of tinsmith and of packages with plugins. If the program is in another package, they
        # find out when they import it.
        if found.get(package, "" if package == "tinsmith" else digest) != digest:
            theirs = f"{found[package][:_SHOWN]}..." if package in found else "none"
            return (
                f"the worker on {hello.host} has other code of the package {package} than this machine (digests "
                f"{theirs} and {digest[:_SHOWN]}...): install the same build on both"
            )
    return None


def _listen(control_address: str | None, path: Path) -> tuple[socket.socket, str]:
    if control_address is None:
        listener = socket.socket(socket.AF_UNIX)
        with SocketDirectory(path.parent) as sockets:
            listener.bind(sockets.address(path.name))
        listener.listen()
        listener.settimeout(_POLL_S)
        return listener, f"unix:{path}"
    host, _, port = control_address.rpartition(":")
    try:
        listener = socket.create_server((host, int(port)))
    except (OSError, ValueError) as error:
        msg = f"control_address {control_address!r}: this machine cannot listen there: {error}"
        raise ConfigError(msg) from error
    listener.settimeout(_POLL_S)
    return listener, f"{host}:{listener.getsockname()[1]}"
