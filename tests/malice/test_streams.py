"""Eight hundred streams beside a tenant that measures: alone and beside them by turns.

This test measures time: it needs the machine to itself. It prints its figures.
"""

import asyncio
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from campaign_server import ATTACKER, BASE_MODEL, NEIGHBOUR, campaign_server
from neighbour import Measured, Neighbour
from open_streams import hold_open, prepare

pytestmark = [pytest.mark.malice, pytest.mark.timeout(900)]

STREAMS = 800
PAIRS, MEASURE_S = 3, 12.0
SLOWER, LATER_S = 2.0, 0.05


@pytest.mark.parametrize("links", [1, 40, 0], ids=["one link", "forty links", "a key"])
def test_a_tenant_hardly_notices_open_streams(links: int, tmp_path: Path) -> None:
    with campaign_server(tmp_path) as server:
        run, headers = prepare(server.url, ATTACKER, BASE_MODEL, links=links)
        hold = partial(hold_open, server.url, ATTACKER, run, headers, streams=STREAMS, seconds=MEASURE_S)
        pairs = asyncio.run(_campaign(server.url, hold))
    for alone, beside, statuses in pairs:
        figures = [f"{kind} {_middle(alone, kind):.3f} -> {_middle(beside, kind):.3f} s" for kind in alone.seconds]
        print(f"\nmedians: {', '.join(figures)}; answers {dict(statuses)}", file=sys.stderr)
        assert not [*alone.wrong[:3], *beside.wrong[:3]]
        assert statuses[429] > statuses[200] > 0
    for kind in ("heartbeat", "sample", "step"):
        alone_s = statistics.median(_middle(alone, kind) for alone, _, _ in pairs)
        beside_s = statistics.median(_middle(beside, kind) for _, beside, _ in pairs)
        assert beside_s <= SLOWER * alone_s + LATER_S, kind


def _middle(measured: Measured, kind: str) -> float:
    return statistics.median(measured.seconds[kind])


async def _campaign(url: str, hold: "partial[dict[int, int]]") -> list[tuple[Measured, Measured, dict[int, int]]]:
    loop, pairs = asyncio.get_running_loop(), []
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        await loop.run_in_executor(pool, time.monotonic)  # starts the process
        async with Neighbour(url, NEIGHBOUR, BASE_MODEL) as neighbour:
            await neighbour.measure(_after(3.0))
            for _ in range(PAIRS):
                alone, over = await neighbour.measure(_after(MEASURE_S)), asyncio.Event()
                held = loop.run_in_executor(pool, hold)
                held.add_done_callback(lambda _, over=over: over.set())
                beside = await neighbour.measure(over)
                pairs.append((alone, beside, await held))
    return pairs


def _after(seconds: float) -> asyncio.Event:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, event.set)
    return event
