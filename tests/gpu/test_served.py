"""A server with trainer and sampler on one GPU, as placement divides it: two tenants, through the SDK and a restart."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from gpu_harness import VOCAB

WAIT_S = 150
FORMS: Mapping[str, Mapping[str, object]] = {
    "fsdp and jax": {
        "backend": {"plugin": "fsdp", "compile": False, "max_context_tokens": 512},
        "sampler": {"plugin": "jax", "max_context_tokens": 512, "warm_up": False},
    },
    "jax": {"backend": {"plugin": "jax", "max_context_tokens": 512, "max_batch_tokens": 1024, "warm_up": False}},
}
CLOSE = 0.05  # nats, on average: of bfloat16


class Served:
    """`tinsmith serve` of one tiny model, started again on the same port."""

    def __init__(self, directory: Path, model: Mapping[str, object]) -> None:
        # reserves a port, on which the server then listens beside it
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._settings, self._log = directory / "tinsmith.json", directory / "log"
        server = {"port": port, "data_dir": str(directory / "data")}
        self._settings.write_text(json.dumps({"server": server, "models": [model]}))

    @contextmanager
    def running(self) -> Iterator[None]:
        command = [sys.executable, "-m", "tinsmith", "serve", "--config", str(self._settings)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TINSMITH_")}
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        try:
            self._wait_until_it_answers(process)
            yield
        except BaseException:
            print(self._log.read_text())
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)

    def _wait_until_it_answers(self, process: "subprocess.Popen[bytes]") -> None:
        while True:
            assert process.poll() is None, "the server ended"
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)  # a process of its own starts, and nothing tells when

    def close(self) -> None:
        self._held.close()


def tokens(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def datum(sequence: list[int]) -> tinker.Datum:
    inputs: Any = {"target_tokens": sequence[1:], "weights": [1.0] * (len(sequence) - 1)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(sequence[:-1]), loss_fn_inputs=inputs)


def scores(output: tinker.ForwardBackwardOutput) -> np.ndarray:
    return np.concatenate([each["logprobs"].tolist() for each in output.loss_fn_outputs])


def trained(clients: list[tinker.TrainingClient], steps: int) -> list[float]:
    """Train all at once; return each one's loss in its last pass, per token."""
    for _ in range(steps):
        passed = [each.forward_backward([datum(tokens(n))], "cross_entropy") for n, each in enumerate(clients)]
        stepped = [each.optim_step(tinker.AdamParams(learning_rate=5e-3)) for each in clients]
        losses = [float(-scores(each.result(timeout=WAIT_S)).mean()) for each in passed]
        for each in stepped:
            each.result(timeout=WAIT_S)
    return losses


def of_trainer(client: tinker.TrainingClient, number: int) -> np.ndarray:
    return scores(client.forward([datum(tokens(number))], "cross_entropy").result(timeout=WAIT_S))


def of_sampler(service: tinker.ServiceClient, path: str, number: int) -> np.ndarray:
    sampler = service.create_sampling_client(model_path=path).result(timeout=WAIT_S)
    prompt = tinker.ModelInput.from_ints(tokens(number))
    params = tinker.SamplingParams(max_tokens=16, seed=number, temperature=1.0)
    (drawn,) = sampler.sample(prompt, 1, params).result(timeout=WAIT_S).sequences
    assert drawn.logprobs is not None
    assert np.isfinite(drawn.logprobs).all()
    return np.asarray(sampler.compute_logprobs(prompt).result(timeout=WAIT_S)[1:], np.float64)


def assert_close(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    assert np.abs(ours - theirs).mean() < CLOSE, what


@pytest.mark.parametrize("form", FORMS)
def test_two_tenants_across_a_restart(form: str, models: Mapping[str, Path], tmp_path: Path) -> None:
    served = Served(tmp_path, {"name": "tiny", "path": str(models["qwen3"]), **FORMS[form]})
    with ExitStack() as stack:
        stack.callback(served.close)
        with served.running():
            services = [tinker.ServiceClient(base_url=served.url, api_key=f"tml-gpu-{who}") for who in "ab"]
            clients = [
                service.create_lora_training_client(base_model="tiny", rank=8, seed=number).result(timeout=WAIT_S)
                for number, service in enumerate(services)
            ]
            first, last = trained(clients, 1), trained(clients, 5)
            assert all(end < start - 0.5 for start, end in zip(first, last, strict=True)), (first, last)
            states = [each.save_state("state").result(timeout=WAIT_S).path for each in clients]
            paths = [each.save_weights_for_sampler("sampler").result(timeout=WAIT_S).path for each in clients]
            before = [of_trainer(each, number) for number, each in enumerate(clients)]
            for number, service in enumerate(services):
                assert_close(of_sampler(service, paths[number], number), before[number], "trainer and sampler")
        with served.running():
            for number, service in enumerate(services):
                assert_close(of_trainer(clients[number], number), before[number], "the trainer after a restart")
                assert_close(of_sampler(service, paths[number], number), before[number], "the sampler likewise")
                again = service.create_training_client_from_state_with_optimizer(states[number]).result(timeout=WAIT_S)
                assert_close(of_trainer(again, number), before[number], "the saved state")
            assert all(after < end for end, after in zip(last, trained(clients, 2), strict=True))
            for service in services:
                service.close("success").result(timeout=WAIT_S)
