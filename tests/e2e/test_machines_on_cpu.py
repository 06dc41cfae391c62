"""The documented machines with the real trainer and the real sampler, on CPUs: each process has a limited memory.

What test_machines.py hands to a toy backend, FSDP ranks and vLLM replicas get here. Fewer of them than cards: this is a
small machine.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
import yaml

from tinsmith.testing import TinyShape, write_tiny_model
from tinsmith.testing.ports import hold_port
from tinsmith.testing.sdk_data import TOKENS, datum, logprobs, step
from tinsmith.testing.served_process import wait_for_url, without_settings
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_workers.launching import KEY

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1200)]

CONFIGURATIONS = Path(__file__).parents[2] / "deploy" / "gpus"
SHAPE = TinyShape(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
TRAINER, SAMPLER = "24MiB", "64MiB"
WAIT_S = 600


@pytest.mark.parametrize(
    ("file", "ranks", "replicas"),
    [("one-card", 1, 1), ("eight-cards", 4, 2), ("eight-cards-colocated", 2, 2), ("two-nodes", 2, 1)],
)
def test_a_documented_machine_trains_and_samples(file: str, ranks: int, replicas: int, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", SHAPE)
    config: dict[str, Any] = yaml.safe_load((CONFIGURATIONS / f"{file}.yaml").read_text(encoding="utf-8"))
    (model,) = config["models"]
    name = model["name"]
    model["path"] = str(tmp_path / "model")
    for section in ("backend", "sampler"):
        model[section].pop("devices", None)
    model["backend"] |= {"device": "cpu", "nproc_per_node": ranks, "memory": TRAINER, "max_lora_rank": 8}
    model["sampler"] |= {"memory": SAMPLER, "replicas": replicas, "max_lora_rank": 8, "max_num_seqs": 16}
    config["server"] = {"port": 0, "data_dir": str(tmp_path / "data")}
    with ExitStack() as stack:
        if "control_address" in model["backend"]:
            held = stack.enter_context(hold_port())
            model["backend"]["control_address"] = f"127.0.0.1:{held.getsockname()[1]}"
        (tmp_path / "tinsmith.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        if "control_address" in model["backend"]:
            address = model["backend"]["control_address"]
            other = ["worker", "--coordinator", address, "--processes", str(ranks), "--again"]
            stack.enter_context(running(other, tmp_path / "worker.log"))
        log = tmp_path / "serve.log"
        server = stack.enter_context(running(["serve", "--config", str(tmp_path / "tinsmith.yaml")], log))
        try:
            use(wait_for_url(server, tmp_path / "data"), name)
        except BaseException:
            print(log.read_text(encoding="utf-8"))
            raise
    printed = log.read_text(encoding="utf-8")
    assert f"({ranks} rank" in printed
    fitting = re.search(r"(\d+) models in training", printed)
    assert fitting is not None
    assert 2 <= int(fitting.group(1)) < FsdpConfig().max_models, "memory decides"
    assert "tokens of keys and values" in printed


def use(url: str, name: str) -> None:
    """Train two tenants, whose steps lower the loss, and sample from what was trained."""
    client = tinker.ServiceClient(base_url=url, api_key="tml-test")
    models = [
        client.create_lora_training_client(base_model=name, rank=8, seed=seed).result(timeout=WAIT_S) for seed in (1, 2)
    ]
    for model in models:
        before = logprobs(model.forward([datum()], "cross_entropy").result(timeout=WAIT_S))
        for _ in range(3):
            step(model, [datum()])
        after = logprobs(model.forward([datum()], "cross_entropy").result(timeout=WAIT_S))
        assert sum(map(sum, after)) > sum(map(sum, before))
        sampler = model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
        params = tinker.SamplingParams(max_tokens=4, stop=[])
        sampled = sampler.sample(tinker.ModelInput.from_ints(TOKENS), 2, params).result(timeout=WAIT_S)
        assert [len(sequence.tokens) for sequence in sampled.sequences] == [4, 4]
    client.close("success").result(timeout=WAIT_S)


@contextmanager
def running(arguments: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinsmith", *arguments],
            stdout=file,
            stderr=file,
            env={**without_settings(), KEY: "a secret of the test, long enough"},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(300)
