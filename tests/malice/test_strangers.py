"""Callers without a valid key and with 1,500 connections, beside a tenant that measures: alone first, then beside them.

These tests measure time: they need the machine to themselves. Every one prints its figures.
"""

import asyncio
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from campaign_server import BASE_MODEL, NEIGHBOUR, campaign_server
from neighbour import Measured, Neighbour
from strangers import flood

pytestmark = [pytest.mark.malice, pytest.mark.timeout(900)]

CONNECTIONS = 1500
MEASURE_S = 10.0
SLOWER, LATER_S = 3.0, 1.0  # p99 beside them: at most three times its value alone, plus a second for 1,500 connects

FLOODS = {
    "descriptions": (["/openapi.json", "/metrics", "/docs"], []),
    "wrong keys": (["/api/v1/get_server_capabilities"], ["x-api-key: tml-wrong"]),
    "forged tokens": (["/api/v1/sessions"], [f"x-api-key: eyJ{'x' * 500}.eyJ{'x' * 500}.x"]),
    "nothing": (["/nothing", f"/api/v1/{'x' * 4000}"], []),
    "probes": (["/healthz", "/readyz"], []),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_tenant_hardly_notices_strangers(name: str, tmp_path: Path) -> None:
    paths, headers = FLOODS[name]
    with campaign_server(tmp_path) as server:
        attack = partial(flood, server.url, paths, connections=CONNECTIONS, seconds=MEASURE_S, headers=headers)
        alone, beside, statuses = asyncio.run(_campaign(server.url, attack))
        figures = [f"{kind} {alone.p99(kind):.3f} -> {beside.p99(kind):.3f} s" for kind in alone.seconds]
        print(f"\n{name}: p99 {', '.join(figures)}; answers {dict(statuses)}", file=sys.stderr)
        late = [kind for kind in alone.seconds if beside.p99(kind) > SLOWER * alone.p99(kind) + LATER_S]
        assert not late, figures
        assert not [*alone.wrong[:3], *beside.wrong[:3]]
        assert not [status for status in statuses if status >= 500 and name != "probes"]
        if name == "probes":
            assert statuses[429] == 0, "an orchestrator would restart the server"
        else:
            assert statuses[429] > 0


async def _campaign(url: str, attack: "partial[dict[int, int]]") -> tuple[Measured, Measured, dict[int, int]]:
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        await loop.run_in_executor(pool, time.monotonic)  # starts the process
        async with Neighbour(url, NEIGHBOUR, BASE_MODEL) as neighbour:
            await neighbour.measure(_after(3.0))
            alone = await neighbour.measure(_after(MEASURE_S))
            over = asyncio.Event()

            async def attack_meanwhile() -> dict[int, int]:
                statuses = await loop.run_in_executor(pool, attack)
                over.set()
                return statuses

            beside, statuses = await asyncio.gather(neighbour.measure(over), attack_meanwhile())
    return alone, beside, statuses


def _after(seconds: float) -> asyncio.Event:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, event.set)
    return event
