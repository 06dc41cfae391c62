"""Several servers and engines on one PostgreSQL, with the real SDK: processes hang, the database restarts."""

import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import tinker
from forked import Forked
from processes import Launcher

from tinsmith import failpoints
from tinsmith.processes.deaths import EXIT_SUPERSEDED
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import running_server
from tinsmith.testing.postgres import Postgres
from tinsmith.testing.saved_files import read_saved
from tinsmith.testing.sdk_data import TOKENS, logprobs, ragged

STEPS = 8
WAIT_S = 400
KEY = "tml-test"
MODELS = [ModelSettings(name=name, backend=PluginSection(plugin="toy")) for name in ("north", "south")]
HANGS = "store.commit.before=stop@20"  # within a transaction, whose locks it keeps


class Process:
    """`tinsmith serve`, or something else of it, on a data directory and database that others use, too."""

    def __init__(
        self,
        launcher: Launcher,
        data_dir: Path,
        url: str,
        engines: list[str],
        *command: str,
        hangs: str | None = None,
    ) -> None:
        content = {
            "server": {"data_dir": str(data_dir), "share_data_dir": True, "port": 0},
            "store": {"plugin": "sql", "url": url},
            "supervisor": {"engines": engines, "restart_backoff_s": 0.05},
            "recovery": {"lease_s": 8.0, "point_every_operations": 5},
            "models": [model.model_dump(mode="json", exclude_none=True) for model in MODELS],
        }
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
        if hangs is not None:
            environ[failpoints.VARIABLE] = hangs
        settings = data_dir.parent / f"{len(list(data_dir.parent.glob('*.yaml')))}.yaml"
        settings.write_text(json.dumps(content))
        self.lines: list[str] = []
        self.said = threading.Condition()
        read, write = os.pipe()
        with os.fdopen(write, "wb") as errors:
            self.process = Forked(launcher, *command, "--config", str(settings), environ=environ, errors=errors)
        self.reader = threading.Thread(target=self.read, args=(os.fdopen(read),), daemon=True)
        self.reader.start()

    def read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                with self.said:
                    self.lines.append(line)
                    self.said.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for a line that has it."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found[:] = [match for line in self.lines if (match := re.search(pattern, line))]
            return bool(found)

        with self.said:
            if not self.said.wait_for(look, WAIT_S):
                raise TimeoutError(f"no {pattern!r} in:\n{''.join(self.lines)}")
        return found[0]

    def wait_until_it_answers(self) -> None:
        self.url = self.wait_for(r"http://127\.0\.0\.1:\d+").group()
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)  # nothing tells when it listens
        raise TimeoutError("".join(self.lines))

    def close(self) -> None:
        if self.process.poll() is None:
            family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
            for each in family:
                with suppress(psutil.NoSuchProcess):  # an engine ends by itself when its server is gone
                    each.kill()
            self.process.wait()
            psutil.wait_procs(family)
        self.reader.join(WAIT_S)


@contextmanager
def replica(launcher: Launcher, data_dir: Path, url: str, engines: list[str]) -> Iterator[Process]:
    server = Process(launcher, data_dir, url, engines, "serve")
    try:
        server.wait_until_it_answers()
        for name in engines:
            server.wait_for(rf"\[{name}\] .*(serving|standby)")
        yield server
    finally:
        server.close()


@contextmanager
def engine(launcher: Launcher, data_dir: Path, url: str, base_model: str, *, hangs: str) -> Iterator[Process]:
    """It serves before the block begins."""
    process = Process(launcher, data_dir, url, [], "engine", base_model, hangs=hangs)
    try:
        process.wait_for("serving")
        yield process
    finally:
        process.close()


def train(url: str, base_model: str, seed: int, at_step: Callable[[int], None] = lambda _: None) -> tuple[Any, str]:
    """Train, score and sample; return all that the client saw, and where the end is saved."""
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    model = service.create_lora_training_client(base_model=base_model, rank=4, seed=seed).result(timeout=WAIT_S)
    seen: list[Any] = []
    for number in range(STEPS):
        passed = model.forward_backward(ragged(3, seed + number), "cross_entropy")
        scored = model.forward(ragged(2, number), "cross_entropy")
        stepped = model.optim_step(tinker.AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
        at_step(number)
        seen += [logprobs(passed.result(timeout=WAIT_S)), logprobs(scored.result(timeout=WAIT_S))]
        seen.append(stepped.result(timeout=WAIT_S).metrics)
    sampler = model.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=5, seed=seed, temperature=1.0)
    answer = sampler.sample(tinker.ModelInput.from_ints(TOKENS), num_samples=2, sampling_params=params)
    seen.append([(each.tokens, each.logprobs) for each in answer.result(timeout=WAIT_S).sequences])
    path = model.save_state("end").result(timeout=WAIT_S).path
    service.close("success").result(timeout=WAIT_S)
    return seen, path


def state_at(data_dir: Path, path: str) -> dict[str, bytes]:
    state = read_saved(data_dir, path).state
    assert state.step == STEPS
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v}
    return {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}


Outcome = tuple[Any, dict[str, bytes]]
Undisturbed = Callable[[str, int], Outcome]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    data_dir = tmp_path_factory.mktemp("undisturbed")
    with running_server(data_dir, models=MODELS) as server:

        def run(base_model: str, seed: int) -> Outcome:
            seen, path = train(server.url, base_model, seed)
            return seen, state_at(data_dir, path)

        yield run


def check_log(postgres: Postgres, url: str, num_models: int) -> None:
    """Every operation that clients sent is there, once, has succeeded, and nothing is noted of any model."""
    log = postgres.execute(
        url,
        "SELECT subject_id, seq_id, state FROM operations "
        "WHERE ordered AND kind <> 'unload_model' ORDER BY subject_id, seq_id",
    )
    models: dict[object, list[object]] = {}
    for subject_id, seq_id, state in log:
        assert state == "succeeded", (subject_id, seq_id, state)
        models.setdefault(subject_id, []).append(seq_id)
    assert len(models) == num_models
    for numbers in models.values():
        assert numbers == list(range(len(numbers)))
    assert postgres.execute(url, "SELECT DISTINCT state_reason FROM runs") == [(None,)]


def retrieve(url: str, request_id: str) -> bytes:
    """Poll until there is a result, whatever it is."""
    body = json.dumps({"request_id": request_id}).encode()
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    while True:
        request = urllib.request.Request(f"{url}/api/v1/retrieve_future", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 408:  # else the long poll ended
                    raise


def wait_until_stopped(process: Process) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if psutil.Process(process.process.pid).status() == psutil.STATUS_STOPPED:
            return
        time.sleep(0.02)  # nothing tells
    raise TimeoutError("".join(process.lines))


def those_that_wait(postgres: Postgres, url: str, base_model: str, runs: list[Future[Any]]) -> list[str]:
    """Return the ids of requests that have no result; wait until there are some, or the clients are done."""
    query = f"SELECT request_id FROM operations WHERE base_model = '{base_model}' AND state IN ('queued', 'running')"
    while not (found := postgres.execute(url, query)) and not all(run.done() for run in runs):
        time.sleep(0.02)  # the clients are about to send
    return [str(request_id) for (request_id,) in found]


def test_an_engine_hangs_past_its_lease_while_clients_of_two_servers_train(
    launcher: Launcher, postgres: Postgres, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """It stops before a commit. One server's engine takes over, and the other has none; it is refused when it wakes."""
    url, data_dir = postgres.new_database(), tmp_path / "data"
    with (
        engine(launcher, data_dir, url, "north", hangs=HANGS) as hung,
        replica(launcher, data_dir, url, []) as one,
        replica(launcher, data_dir, url, ["north", "south"]) as two,
        ThreadPoolExecutor(4) as threads,
    ):
        clients = [("north", 1, one), ("north", 2, two), ("south", 3, two)]
        runs = [threads.submit(train, server.url, name, seed) for name, seed, server in clients]
        wait_until_stopped(hung)
        waiting = those_that_wait(postgres, url, "north", runs)
        polls = [threads.submit(retrieve, one.url, request_id) for request_id in waiting]
        two.wait_for(r"\[north\] .*serving 'north' with epoch 2")
        hung.process.send_signal(signal.SIGCONT)
        hung.wait_for(r"no longer holds its lease \(epoch 1\)")
        assert hung.process.wait(WAIT_S) == EXIT_SUPERSEDED
        outcomes = [run.result(WAIT_S) for run in runs]
        for request_id, poll in zip(waiting, polls, strict=True):
            assert poll.result(WAIT_S) == retrieve(two.url, request_id)
        check_log(postgres, url, num_models=len(clients))
    for (name, seed, _), (seen, path) in zip(clients, outcomes, strict=True):
        assert (seen, state_at(data_dir, path)) == undisturbed(name, seed), name


def test_the_database_restarts_while_a_client_trains(
    launcher: Launcher, own_postgres: Postgres, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """It ends at once, with connections and transactions open. The client sees delay."""
    url, data_dir = own_postgres.new_database(), tmp_path / "data"
    stops: list[int] = []

    def restart(number: int) -> None:
        if number in {2, 5}:  # with a step's three requests under way
            own_postgres.stop(signal.SIGQUIT)
            own_postgres.start()
            stops.append(number)

    with replica(launcher, data_dir, url, ["north"]) as server:
        outcome = train(server.url, "north", 1, restart)
        server.wait_for("is back after")
        check_log(own_postgres, url, num_models=1)
    assert stops == [2, 5]
    assert (outcome[0], state_at(data_dir, outcome[1])) == undisturbed("north", 1)
