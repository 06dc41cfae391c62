"""A run of the SDK, undisturbed and while processes are killed: what the client sees, and what is saved at the end."""

import json
import os
import signal
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import tinker
from forked import Forked
from processes import Launcher

from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import TOY, running_server
from tinsmith.testing.ports import hold_port
from tinsmith.testing.saved_files import read_saved
from tinsmith.testing.sdk_data import TOKENS, logprobs, ragged
from tinsmith_workers.launching import INDEX

STEPS = 20
WAIT_S = 600


class Served:
    """`tinsmith serve` of one model on one port, again and again."""

    def __init__(
        self,
        launcher: Launcher,
        data_dir: Path,
        model: ModelSettings,
        *,
        environ: Mapping[str, str] = MappingProxyType({}),
        **server: str,
    ) -> None:
        """`environ`: more variables, for the server and its engines."""
        self.launcher = launcher
        ours = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
        self.environ = {**ours, **environ}
        self.data_dir = data_dir
        self.model = model
        self.held = hold_port()
        self.port = self.held.getsockname()[1]
        self.settings = data_dir.with_suffix(".yaml")
        content = {
            "server": {"data_dir": str(data_dir), "port": self.port, **server},
            "supervisor": {"restart_backoff_s": 0.05, "restart_backoff_max_s": 0.1, "max_restarts": 1000},
            # a worker's death counts as a crash of its engine, and the deaths of a test come in a row
            "recovery": {"point_every_operations": 7, "max_retries": 1000},
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
        self.process = Forked(self.launcher, *command, environ=self.environ, errors=self.log)

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

    def workers(self) -> list[psutil.Process]:
        """Return the workers of the engine's backend, by rank: those that live at the moment.

        They are children of the engine, and the launcher has forked that.
        """
        found: dict[int, psutil.Process] = {}
        for engine in psutil.Process(self.launcher.process.pid).children():
            with suppress(psutil.NoSuchProcess):
                found |= {int(each.environ()[INDEX]): each for each in engine.children() if is_worker(each)}
        return [found[rank] for rank in sorted(found)]

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


def is_worker(process: psutil.Process) -> bool:
    return process.cmdline()[1:] == ["-m", "tinsmith_workers"]  # empty once it has ended


@contextmanager
def serving(
    launcher: Launcher,
    data_dir: Path,
    model: ModelSettings = TOY,
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
    **server: str,
) -> Iterator[Served]:
    served = Served(launcher, data_dir, model, environ=environ, **server)
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
    state = read_saved(data_dir, path).state
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
    if killer.error is not None:
        raise killer.error
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
