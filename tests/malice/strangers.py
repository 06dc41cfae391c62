"""Callers without a key, over many connections: each sends again as soon as it has an answer."""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from urllib.parse import urlsplit

IDLE_S = 60.0  # a connection without an answer for this long is opened again


def flood(
    url: str, paths: Sequence[str], *, connections: int, seconds: float, headers: Sequence[str] = ()
) -> Counter[int]:
    """Return how many answers had which status; 0 stands for connections that ended without one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return asyncio.run(_flood(url, paths, connections, seconds, headers))


async def _flood(
    url: str, paths: Sequence[str], connections: int, seconds: float, headers: Sequence[str]
) -> Counter[int]:
    address, found = urlsplit(url), Counter[int]()
    until = time.monotonic() + seconds
    more = "".join(f"{line}\r\n" for line in headers)
    requests = [f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{more}\r\n".encode() for path in paths]

    async def one(place: int) -> None:
        for request in cycle(islice(cycle(requests), place, place + len(requests))):
            try:
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
            except OSError:
                found[0] += 1
                await asyncio.sleep(0.1)
                continue
            try:
                while time.monotonic() < until:
                    writer.write(request)
                    async with asyncio.timeout(min(IDLE_S, max(0.01, until - time.monotonic()))):
                        head = await reader.readuntil(b"\r\n\r\n")
                        await reader.readexactly(_length(head))
                    found[int(head.split(b" ", 2)[1])] += 1
            except TimeoutError:
                found[0] += 1
            except (OSError, asyncio.IncompleteReadError):
                found[0] += 1
            finally:
                writer.transport.abort()
            if time.monotonic() >= until:
                return

    await asyncio.gather(*(one(place) for place in range(connections)))
    return found


def _length(head: bytes) -> int:
    line = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
    return int(line.split(b":")[1])
