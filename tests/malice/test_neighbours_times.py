"""A neighbour's training step, alone and beside the dearest requests to each route: core's and every plugin's.

These tests measure time, so they need the machine to themselves. Each prints its pairs.
"""

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median

import orjson
import pytest
from attacker import Attacker, Request
from campaign_server import ATTACKER, BASE_MODEL, NEIGHBOUR, CampaignServer, campaign_server
from neighbour import Neighbour
from request_walk import Dear, every_route, objects

from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

pytestmark = [pytest.mark.malice, pytest.mark.timeout(3600)]

CONNECTIONS = 4
STEPS = 15  # of each half of a pair
TWICE, MORE_S = 2.0, 0.05
TRIES = 2  # another program on the machine may come in between


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of the neighbour's steps, alone and beside an attack."""

    alone: list[float]
    beside: list[float]

    @property
    def holds(self) -> bool:
        return median(self.beside) <= TWICE * median(self.alone) + MORE_S

    def __str__(self) -> str:
        alone, beside, longest = (1000 * each for each in (median(self.alone), median(self.beside), max(self.beside)))
        return f"{alone:.0f} -> {beside:.0f} ms, longest {longest:.0f} ms"


@pytest.mark.parametrize("of_core", [True, False], ids=["core", "plugins"])
def test_a_step_takes_at_most_twice_as_long_beside_any_route(of_core: bool, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", TinyShape(num_layers=1, hidden_size=16))
    backend = {"vocab_size": 4096, "max_context_tokens": 1 << 15}
    with campaign_server(tmp_path, model={"path": str(tmp_path / "model")}, backend=backend) as server:
        with Attacker(server.url, ATTACKER, BASE_MODEL) as attacker:
            ids = objects(attacker)
            description = orjson.loads(attacker.send(Request("/openapi.json", b"", method="GET")).content)
        attacks = [each for each in every_route(description, ids) if each.of_core == of_core]
        pairs = asyncio.run(_pairs(server, attacks))
    late = {name: str(pair) for name, pair in pairs.items() if not pair.holds}
    assert not late


async def _pairs(server: CampaignServer, attacks: Sequence[Dear]) -> dict[str, Pair]:
    context = multiprocessing.get_context("spawn")
    pairs = {}
    with ProcessPoolExecutor(1, mp_context=context) as pool, context.Manager() as manager:
        async with Neighbour(server.url, NEIGHBOUR, BASE_MODEL) as neighbour:
            model_id, numbers = await neighbour.create_model(), count()

            async def steps() -> list[float]:
                return [await _timed(neighbour.step(model_id, next(numbers))) for _ in range(STEPS)]

            await steps()  # warms up

            async def pair(attack: Dear) -> Pair:
                alone = await steps()
                over, begun = manager.Event(), manager.Event()
                attacking = asyncio.get_running_loop().run_in_executor(pool, _again, server.url, attack, begun, over)
                await asyncio.to_thread(begun.wait)
                beside = await steps()
                over.set()
                await attacking
                return Pair(alone, beside)

            for attack in attacks:
                for _ in range(TRIES):
                    pairs[attack.name] = await pair(attack)
                    print(f"{attack.name}: {pairs[attack.name]}", file=sys.stderr, flush=True)
                    if pairs[attack.name].holds:
                        break
    return pairs


async def _timed(work: Awaitable[object]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


def _again(url: str, attack: Dear, begun: Event, over: Event) -> None:
    """Send the requests until it is over, over several connections."""
    with Attacker(url, ATTACKER, BASE_MODEL) as attacker, ThreadPoolExecutor(CONNECTIONS) as pool:

        def send(requests: Sequence[Request]) -> None:
            while True:
                for request in requests:
                    begun.set()
                    attacker.send(request)
                    if over.is_set():
                        return

        list(pool.map(send, [attack.requests] * CONNECTIONS))
