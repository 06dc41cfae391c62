"""Attacks of one tenant, each beside a neighbour who measures: alone first, then under attack.

These tests measure time: they need the machine to themselves. Every one prints its figures.
"""

import asyncio
import multiprocessing
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson
import pytest
import wire_bodies
from attacker import Answer, Attacker, Request, assault
from attacks import ATTACKS, MB, Attack
from campaign_server import ATTACKER, BASE_MODEL, NEIGHBOUR, THIRD, CampaignServer, MemoryWatch, campaign_server
from neighbour import Measured, Neighbour

pytestmark = [pytest.mark.malice, pytest.mark.timeout(900)]

MEASURE_S = 10.0  # at least; longer if the attack lasts longer
WARM_UP_S = 3.0
SLOWER = 3.0  # p99 beside an attack: at most so many times its value alone, plus `later_s`
GROWTH_BYTES = 500 * MB


@dataclass(frozen=True, slots=True)
class Outcome:
    alone: Measured
    beside: Measured
    answers: list[Answer]
    growth: dict[str, int]
    died: bool
    database_bytes: int


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_neighbour_hardly_notices(attack: Attack, tmp_path: Path) -> None:
    with campaign_server(tmp_path, server=attack.server, backend=attack.backend) as server:
        outcome = asyncio.run(_campaign(server, attack))
        print(f"\n{attack.name}: {_figures(outcome)}", file=sys.stderr)
        wrong = _wrong(server, outcome, attack)
        assert not wrong, "\n".join(wrong)


async def _campaign(server: CampaignServer, attack: Attack) -> Outcome:
    with Attacker(server.url, ATTACKER, BASE_MODEL) as attacker:
        requests = attack.prepare(attacker)
    loop, pids = asyncio.get_running_loop(), server.processes()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        await loop.run_in_executor(pool, time.monotonic)  # starts the process
        async with (
            Neighbour(server.url, NEIGHBOUR, BASE_MODEL) as neighbour,
            Neighbour(server.url, THIRD, BASE_MODEL) as third,
        ):
            newcomer = third if attack.models else None
            await neighbour.measure(_after(WARM_UP_S))
            alone = await neighbour.measure(_after(MEASURE_S), newcomer)
            memory, database_bytes = MemoryWatch(pids), server.database_bytes()
            enough, over = _after(MEASURE_S), asyncio.Event()

            async def attack_meanwhile() -> list[Answer]:
                work = partial(
                    assault,
                    *(server.url, ATTACKER, BASE_MODEL, requests),
                    connections=attack.connections,
                    persists=attack.persists,
                    await_first=attack.await_first,
                )
                answers = await loop.run_in_executor(pool, work)
                await enough.wait()
                over.set()
                return answers

            beside, answers = await asyncio.gather(neighbour.measure(over, newcomer), attack_meanwhile())
    return Outcome(
        alone=alone,
        beside=beside,
        answers=answers,
        growth=memory.growth(),
        died=server.processes() != pids,
        database_bytes=server.database_bytes() - database_bytes,
    )


def _after(seconds: float) -> asyncio.Event:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, event.set)
    return event


def _wrong(server: CampaignServer, outcome: Outcome, attack: Attack) -> list[str]:
    """Return everything that must not be."""
    found = [*outcome.alone.wrong[:3], *outcome.beside.wrong[:3]]
    for kind in outcome.alone.seconds:
        alone, beside = outcome.alone.p99(kind), outcome.beside.p99(kind)
        if beside > SLOWER * alone + attack.later_s:
            found.append(f"{kind}: p99 {beside:.2f} s beside the attack, {alone:.3f} s alone")
    found += [f"{role} grew by {num // MB} MB" for role, num in outcome.growth.items() if num > GROWTH_BYTES]
    if outcome.database_bytes > attack.most_stored:
        found.append(f"the database grew by {outcome.database_bytes // MB} MB")
    if outcome.died:
        found.append("a process died")
    found += [f"the attacker got {answer}" for answer in outcome.answers if not 200 <= answer.status < 500][:3]
    accepted = [answer.request_id for answer in outcome.answers if answer.request_id is not None]
    if (recorded := server.recorded(accepted)) < len(accepted):
        found.append(f"{len(accepted) - recorded} of {len(accepted)} accepted operations are lost")
    both = outcome.alone.steps.keys() & outcome.beside.steps.keys()
    if not both or any(outcome.alone.steps[number] != outcome.beside.steps[number] for number in both):
        found.append("the neighbour's training got other bits")
    return found


def _figures(outcome: Outcome) -> str:
    latencies = [
        f"{kind} {outcome.alone.p99(kind):.3f} -> {outcome.beside.p99(kind):.3f} s" for kind in outcome.alone.seconds
    ]
    growth = [f"{role} +{num // MB} MB" for role, num in outcome.growth.items()]
    statuses = Counter(answer.status for answer in outcome.answers)
    longest = max((answer.took_s for answer in outcome.answers), default=0.0)
    return (
        f"p99 {', '.join(latencies)}; {', '.join(growth)}; database +{outcome.database_bytes // MB} MB; "
        f"answers {dict(statuses)}, longest {longest:.1f} s{'; A PROCESS DIED' if outcome.died else ''}"
    )


def test_a_stall_of_the_server_fails_nothing_that_it_accepted(tmp_path: Path) -> None:
    """A number that a client sends while the server stands still is late through no fault of the client."""
    gap_timeout_s = 40.0
    with (
        campaign_server(tmp_path, server={"gap_timeout_s": gap_timeout_s}) as server,
        Attacker(server.url, THIRD, BASE_MODEL) as third,
        Attacker(server.url, THIRD, BASE_MODEL) as same,
        ThreadPoolExecutor(1) as pool,
    ):
        model_id = third.new_model()
        second = third.send(Request("optim_step", wire_bodies.optim_step(model_id, 2)))
        server.process.send_signal(signal.SIGSTOP)
        late = pool.submit(same.send, Request("optim_step", wire_bodies.optim_step(model_id, 1)))
        time.sleep(1.5 * gap_timeout_s)  # this is the stall
        server.process.send_signal(signal.SIGCONT)
        results = [third.result(answer.request_id or "") for answer in (late.result(), second)]
        assert all("grad_norm" in result.text for result in results), results


def test_a_checkpoint_that_is_no_longer_published_is_closed_to_others(tmp_path: Path) -> None:
    with (
        campaign_server(tmp_path) as server,
        Attacker(server.url, NEIGHBOUR, BASE_MODEL) as owner,
        Attacker(server.url, THIRD, BASE_MODEL) as other,
    ):
        model_id = owner.new_model()
        for number, (verb, path) in enumerate((("DELETE", "/publish"), ("DELETE", ""))):
            saved = owner.ask("save_weights_for_sampler", model_id=model_id, seq_id=1 + number, path=f"named-{number}")
            model_path = orjson.loads(owner.result(saved["request_id"]).content)["path"]
            checkpoint = f"training_runs/{model_id}/checkpoints/sampler_weights/named-{number}"
            assert owner.send(Request(f"{checkpoint}/publish", b"")).status < 300
            fields = {"session_id": other.new_session(), "sampling_session_seq_id": 0, "model_path": model_path}
            sampler_id = other.ask("create_sampling_session", **fields)["sampling_session_id"]
            before, after = (Request("asample", wire_bodies.sample(sampler_id, seq_id)) for seq_id in (0, 1))
            accepted = other.send(before)
            assert other.result(accepted.request_id or "").status == 200
            assert owner.send(Request(checkpoint + path, b"", method=verb)).status < 300
            refused = other.send(after)
            assert 400 <= refused.status < 500, refused


def test_the_number_of_a_sampling_session_stands_for_one_sampler(tmp_path: Path) -> None:
    with campaign_server(tmp_path) as server, Attacker(server.url, THIRD, BASE_MODEL) as third:
        model_id = third.new_model()
        saved = third.ask("save_weights_for_sampler", model_id=model_id, seq_id=1, path="named")
        model_path = orjson.loads(third.result(saved["request_id"]).content)["path"]
        number = {"session_id": model_id.partition(":")[0], "sampling_session_seq_id": 7}
        first, again, other = (
            third.send(Request.json("create_sampling_session", **number, **source))
            for source in ({"base_model": BASE_MODEL}, {"base_model": BASE_MODEL}, {"model_path": model_path})
        )
        assert (first.status, first.content) == (200, again.content)
        assert 400 <= other.status < 500, other
