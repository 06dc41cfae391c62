"""Hundreds of streams of one run, whose owner logs a point after another."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx

Header = tuple[str, str]


def prepare(url: str, key: str, base_model: str, *, links: int) -> tuple[str, list[Header]]:
    """Return a new run, and the headers by which its streams are asked for: of so many links, or with the key."""
    with httpx.Client(base_url=f"{url}/api/v1/", headers={"x-api-key": key}, timeout=60) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": {"rank": 4}}
        run = str(http.post("create_model", json=body).json()["model_id"])
        made = [http.post(f"runs/{run}/share_links", json={}).json()["url"] for _ in range(links)]
    secrets = [parse_qs(urlsplit(each).fragment)["share"][0] for each in made]
    return run, [("x-share-secret", each) for each in secrets] or [("x-api-key", key)]


def hold_open(url: str, key: str, run: str, headers: Sequence[Header], *, streams: int, seconds: float) -> Counter[int]:
    """Return how many streams were answered by which status. Whoever is refused asks again when the answer says so."""
    return asyncio.run(_hold_open(url, key, run, headers, streams, seconds))


async def _hold_open(
    url: str, key: str, run: str, headers: Sequence[Header], streams: int, seconds: float
) -> Counter[int]:
    address, found, until = urlsplit(url), Counter[int](), time.monotonic() + seconds
    target = f"/api/v1/run_events?{urlencode({'run': run})}"

    async def one(header: Header) -> None:
        request = f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\n{': '.join(header)}\r\nconnection: close\r\n\r\n"
        while time.monotonic() < until:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(request.encode())
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    found[int(head.split()[1])] += 1
                    while await reader.read(1 << 16):
                        pass
                    retry_after = re.search(rb"retry-after: (\d+)", head)
                    await asyncio.sleep(int(retry_after[1]) if retry_after else 1)
            except (TimeoutError, OSError, asyncio.IncompleteReadError):
                found[0] += 1
            finally:
                writer.transport.abort()

    async def log() -> None:
        async with httpx.AsyncClient(base_url=f"{url}/api/v1/", headers={"x-api-key": key}, timeout=60) as http:
            step = 0
            while time.monotonic() < until:
                values = {f"metric {number}": float(step) for number in range(30)}
                await http.post(f"runs/{run}/metrics", json={"points": [{"step": step, "values": values}]})
                step += 1
                await asyncio.sleep(0.1)

    await asyncio.gather(log(), *(one(headers[place % len(headers)]) for place in range(streams)))
    return found
