"""What both fuzzers share: the server, how long they go on, and what must hold whatever they send."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import wire_bodies
from attacker import Answer, Attacker, Request
from attacks import MB
from campaign_server import ATTACKER, BASE_MODEL, NEIGHBOUR, MemoryWatch, api_keys, campaign_server
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tinsmith.testing.harness import running_server

SETTINGS = {"long_poll_s": 0.2, "gap_timeout_s": 5.0, "session_timeout_s": 3600.0, "api_keys": api_keys()}
NEIGHBOURS_STEPS = 8
GROWTH_BYTES = 300 * MB


@dataclass(frozen=True, slots=True)
class Form:
    name: str
    examples: int  # of each strategy, in a round
    seconds: float  # rounds go on until then, each with the next seed; 0: one round

    def of(self, times: int) -> "Form":
        """Return a form with so many times the examples."""
        return replace(self, examples=times * self.examples)


FORMS = [
    pytest.param(Form("short", 2, 0.0), id="short"),
    pytest.param(
        Form("long", 10, float(os.environ.get("MALICE_FUZZ_S", "120"))),
        id="long",
        marks=[pytest.mark.malice, pytest.mark.timeout(7200)],
    ),
]


@contextmanager
def fuzzed_server(form: Form, directory: Path) -> Iterator[tuple[str, dict[int, str]]]:
    """Yield the URL and the processes to watch: in the short form this one, in the long form `tinsmith serve`."""
    if form.seconds == 0:
        with running_server(directory, server=SETTINGS, store_options={"synchronous": "off"}) as server:
            yield server.url, {os.getpid(): "this process"}
    else:
        with campaign_server(directory, server=SETTINGS) as served:
            yield served.url, served.processes()
            assert served.processes().keys() == served.born.keys(), "a process died"


def examples_of(strategy: SearchStrategy[Any], check: Callable[[Any], None], form: Form, number: int) -> None:
    """Check what the strategy draws with this seed."""

    @seed(number)
    @settings(max_examples=form.examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(example: Any) -> None:
        check(example)

    run()


class Properties:
    """Holds every answer to what a client may rely on, and lets a neighbour train in between."""

    def __init__(self, url: str, pids: dict[int, str]) -> None:
        self.attacker = Attacker(url, ATTACKER, BASE_MODEL)
        self._neighbour = Attacker(url, NEIGHBOUR, BASE_MODEL)
        self._pids = pids
        self._checked = 0
        self._statuses = Counter[int]()
        self._begin_training()
        self._alone = [self._step() for _ in range(NEIGHBOURS_STEPS)]
        self._begin_training()
        self._memory = MemoryWatch(pids)

    def __enter__(self) -> "Properties":
        return self

    def __exit__(self, *_: object) -> None:
        self.attacker.close()
        self._neighbour.close()

    def check(self, request: Request) -> Answer:
        """Send a request. If it is accepted, it ends, waits for a missing number, or fails by the client's fault."""
        return self.check_answer(self.attacker.send(request))

    def check_answer(self, answer: Answer) -> Answer:
        assert 200 <= answer.status < 500, answer
        if answer.request_id is not None:
            result = self.attacker.send(Request.json("retrieve_future", request_id=answer.request_id))
            assert result.status in {200, 408}, result
            assert result.error_category in {None, "user"}, result
        self._statuses[answer.status] += 1
        self._checked += 1
        if self._checked % 10 == 0:
            self.check_neighbour()
        return answer

    def check_neighbour(self) -> None:
        """It gets the bits that it got alone."""
        if self._seq_id > 2 * NEIGHBOURS_STEPS:
            self._begin_training()
        number = self._seq_id // 2
        assert self._step() == self._alone[number]

    def check_memory(self) -> None:
        growth = self._memory.growth()
        assert growth.keys() == set(self._pids.values()), f"only {sorted(growth)} live on"
        assert max(growth.values()) < GROWTH_BYTES, growth

    @property
    def summary(self) -> str:
        growth = ", ".join(f"{role} +{num // MB} MB" for role, num in self._memory.growth().items())
        return f"{self._checked} requests, answers {dict(self._statuses)}; {growth}"

    def _begin_training(self) -> None:
        self._neighbour.end_session()
        self._model_id, self._seq_id = self._neighbour.new_model(), 1

    def _step(self) -> bytes:
        body = wire_bodies.forward_backward(self._model_id, self._seq_id, data=2, tokens=16, vary=self._seq_id)
        passed = self._neighbour.send(Request("forward_backward", body, wire_bodies.PROTOBUF))
        stepped = self._neighbour.send(Request("optim_step", wire_bodies.optim_step(self._model_id, self._seq_id + 1)))
        self._seq_id += 2
        results = [self._neighbour.result(answer.request_id or "") for answer in (passed, stepped)]
        assert all(result.status == 200 and result.error_category is None for result in results), results
        return results[0].content
