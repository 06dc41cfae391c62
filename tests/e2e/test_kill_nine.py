"""The unmodified SDK trains while processes are killed with SIGKILL: it sees delay, and the undisturbed run's bits."""

import json
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tinker
from forked import Forked
from processes import Launcher

from tinsmith.checkpoints.format import read_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import TOY, running_server
from tinsmith.testing.ports import hold_port
from tinsmith.testing.sdk_data import TOKENS, logprobs, ragged, wait_until_at_rest

pytestmark = pytest.mark.slow

STEPS = 20
KILLS = 10
WAIT_S = 600


class Served:
    """`tinsmith serve` of one model on one port, again and again."""

    def __init__(self, launcher: Launcher, data_dir: Path, model: ModelSettings, **server: str) -> None:
        self.launcher = launcher
        self.data_dir = data_dir
        self.model = model
        self.held = hold_port()
        self.port = self.held.getsockname()[1]
        self.settings = data_dir.with_suffix(".yaml")
        content = {
            "server": {"data_dir": str(data_dir), "port": self.port, **server},
            "supervisor": {"restart_backoff_s": 0.05, "restart_backoff_max_s": 0.1, "max_restarts": 1000},
            "recovery": {"point_every_operations": 7},
            "models": [model.model_dump(mode="json", exclude_none=True)],
        }
        self.settings.write_text(json.dumps(content))
        self.log = data_dir.with_suffix(".log").open("wb")
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = ("serve", "--config", str(self.settings))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
        self.process = Forked(self.launcher, *command, environ=environ, errors=self.log)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)  # a process of its own starts, and nothing tells when
        raise TimeoutError(self.log.name)

    def kill_engine(self) -> bool:
        """Return whether there was one to kill."""
        try:
            (engine,) = psutil.Process(self.process.pid).children()
            os.kill(engine.pid, signal.SIGKILL)
        except (ValueError, psutil.NoSuchProcess, ProcessLookupError):
            return False
        return True

    def kill_everything(self) -> None:
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):  # an engine ends by itself when its server is gone
                each.kill()
        self.process.wait()
        psutil.wait_procs(family)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill_everything()
        self.log.close()
        self.held.close()


@contextmanager
def serving(launcher: Launcher, data_dir: Path, model: ModelSettings = TOY, **server: str) -> Iterator[Served]:
    served = Served(launcher, data_dir, model, **server)
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.close()


def run(service: tinker.ServiceClient, base_model: str, at_step: Callable[[int], None]) -> tuple[list[Any], str]:
    """Train with passes, scores, saves and samplers; return all that the client saw, and where the end is saved."""
    training = service.create_lora_training_client(base_model=base_model, rank=4, seed=1).result(timeout=WAIT_S)
    seen: list[Any] = []
    sampler = None
    for number in range(STEPS):
        at_step(number)
        passed = training.forward_backward(ragged(3, number), "cross_entropy")
        scored = training.forward(ragged(2, number), "cross_entropy")
        adam = tinker.AdamParams(learning_rate=0.01, grad_clip_norm=1.0)
        stepped = training.optim_step(adam)
        seen += [logprobs(passed.result(timeout=WAIT_S)), logprobs(scored.result(timeout=WAIT_S))]
        seen.append(stepped.result(timeout=WAIT_S).metrics)
        if number % 5 == 1:
            sampler = training.save_weights_and_get_sampling_client().result()
        if number % 5 == 2:
            training.save_state(f"step-{number}").result(timeout=WAIT_S)
        if sampler is not None:
            params = tinker.SamplingParams(max_tokens=5, seed=number, temperature=1.0)
            prompt = tinker.ModelInput.from_ints(TOKENS)
            answer = sampler.sample(prompt, num_samples=2, sampling_params=params).result(timeout=WAIT_S)
            seen.append([(each.tokens, each.logprobs) for each in answer.sequences])
    return seen, training.save_state("end").result(timeout=WAIT_S).path


def undisturbed(data_dir: Path, model: ModelSettings) -> tuple[list[Any], dict[str, bytes]]:
    with running_server(data_dir, models=[model]) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        seen, path = run(service, model.name, lambda _: None)
        service.close("success").result(timeout=WAIT_S)
    return seen, state_at(data_dir, path)


def state_at(data_dir: Path, path: str) -> dict[str, bytes]:
    state = read_checkpoint(data_dir / "checkpoints", TinkerPath.parse(path).directory).state
    assert state.step == STEPS
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v}
    return {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}


class Killer(threading.Thread):
    """Kills at the steps and after the delays that it was given."""

    def __init__(self, kill: Callable[[], bool], moments: list[tuple[int, float]]) -> None:
        super().__init__(daemon=True)
        self.kill = kill
        self.moments = moments
        self.kills = 0
        self.error: Exception | None = None
        self._step = -1
        self._news = threading.Condition()

    def at_step(self, number: int) -> None:
        with self._news:
            self._step = number
            self._news.notify_all()

    def run(self) -> None:
        try:
            for step, delay_s in self.moments:
                with self._news:
                    self._news.wait_for(lambda step=step: self._step >= step)
                time.sleep(delay_s)  # the moment is the point of the test
                while not self.kill():
                    time.sleep(0.01)  # between two engines
                self.kills += 1
        except Exception as error:  # noqa: BLE001 - the test raises it
            self.error = error


def check(served: Served, killer: Killer, expected: list[Any], state: dict[str, bytes]) -> None:
    killer.start()
    service = tinker.ServiceClient(base_url=served.url, api_key="tml-test")
    seen, path = run(service, served.model.name, killer.at_step)
    killer.join(WAIT_S)
    assert killer.error is None
    assert killer.kills == len(killer.moments)
    assert seen == expected
    assert state_at(served.data_dir, path) == state
    with sqlite3.connect(served.data_dir / "tinsmith.db") as database:
        model_id = TinkerPath.parse(path).model_id
        log = database.execute("SELECT seq_id, state FROM operations WHERE subject_id = ? ORDER BY seq_id", (model_id,))
        operations = log.fetchall()
        notes = database.execute("SELECT state, state_reason FROM runs").fetchall()
    database.close()
    assert operations == [(number, "succeeded") for number in range(len(operations))]
    assert notes == [("ready", None)]
    service.close("success").result(timeout=WAIT_S)


@pytest.mark.thorough  # crash/test_campaign.py does so in `make test`
def test_the_engine_is_killed_at_random_moments(launcher: Launcher, tmp_path: Path) -> None:
    random_ = random.Random(20)
    moments = [(2 * number, random_.uniform(0.0, 0.1)) for number in range(KILLS - 3)]
    moments += [(step, random_.uniform(0.3, 2.0)) for step in (4, 8, 12)]  # while the next engine starts or recovers
    with serving(launcher, tmp_path / "killed") as served:
        expected = undisturbed(tmp_path / "undisturbed", served.model)
        check(served, Killer(served.kill_engine, sorted(moments)), *expected)


@pytest.mark.thorough  # as above
def test_everything_is_killed_and_started_again(launcher: Launcher, tmp_path: Path) -> None:
    with serving(launcher, tmp_path / "killed") as served:

        def kill_and_start() -> bool:
            served.kill_everything()
            served.start()
            return True

        random_ = random.Random(21)
        moments = [(step, random_.uniform(0.0, 0.1)) for step in (5, 13)]
        expected = undisturbed(tmp_path / "undisturbed", served.model)
        check(served, Killer(kill_and_start, moments), *expected)


def test_everything_is_killed_while_a_client_waits_for_many_samples(launcher: Launcher, tmp_path: Path) -> None:
    """The client polls for all its samples with one cursor, which the kill does not take from it."""
    prompt = tinker.ModelInput.from_ints(TOKENS)

    def samples(sampler: tinker.SamplingClient, seeds: range) -> list[Any]:
        params = [tinker.SamplingParams(max_tokens=8, seed=seed) for seed in seeds]
        return [sampler.sample(prompt, num_samples=1, sampling_params=each) for each in params]

    def tokens(futures: list[Any]) -> list[list[int]]:
        return [future.result(timeout=WAIT_S).sequences[0].tokens for future in futures]

    with serving(launcher, tmp_path / "killed", poll_samples_together="always") as served:
        service = tinker.ServiceClient(base_url=served.url, api_key="tml-test")
        sampler = service.create_sampling_client(base_model="toy").result(timeout=WAIT_S)
        futures = samples(sampler, range(15))
        futures[0].result(timeout=WAIT_S)
        served.kill_everything()
        futures += samples(sampler, range(15, 30))
        served.start()
        seen = tokens(futures)
        with sqlite3.connect(served.data_dir / "tinsmith.db") as database:
            finished = database.execute("SELECT number, request_id FROM finished_samples ORDER BY number").fetchall()
            states = database.execute("SELECT state, count(*) FROM operations GROUP BY state").fetchall()
        database.close()
        wait_until_at_rest(sampler)
        service.close("success").result(timeout=WAIT_S)
    assert states == [("succeeded", 30)]  # nothing was sent again under another number
    assert [number for number, _ in finished] == list(range(1, 31))
    assert len({request_id for _, request_id in finished}) == 30
    with running_server(tmp_path / "undisturbed", models=[TOY]) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        assert tokens(samples(service.create_sampling_client(base_model="toy").result(), range(30))) == seen
        service.close("success").result(timeout=WAIT_S)


@pytest.mark.thorough
def test_an_engine_of_the_jax_backend_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    """The engine finds the programs that the undisturbed run compiled, as an engine does that is started again."""
    shape = TinyShape(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
    )
    write_tiny_model(tmp_path / "tiny", shape)
    options = {"plugin": "jax", "max_lora_rank": 8, "max_context_tokens": 128, "max_batch_tokens": 128}
    model = ModelSettings(
        name="tiny", path=tmp_path / "tiny", backend=PluginSection.model_validate({**options, "warm_up": False})
    )
    from jax._src import compilation_cache  # nothing public says which directory is in use

    expected = undisturbed(tmp_path / "undisturbed", model)
    compiled_here = compilation_cache._cache._path  # where this process keeps all that it compiles
    shutil.copytree(compiled_here, tmp_path / "killed" / "cache" / "jax" / "tiny" / "compiled")
    random_ = random.Random(22)
    with serving(launcher, tmp_path / "killed", model) as served:
        moments = [(step, random_.uniform(0.0, 0.3)) for step in (3, 9, 15)]
        check(served, Killer(served.kill_engine, moments), *expected)
