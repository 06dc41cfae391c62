"""Six tenants on a JAX server that has just started, each alone and all together, through the SDK: the same bits.

While some programs are still being compiled, passes run in larger ones that are ready. Sequences are long and short, so
tenants together fill passes of other sizes than alone. Programs are compiled as users have them.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from jax_harness import as_shipped

from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import logprobs
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # short: what parts of a pass compute, in test_jax_isolation.py

WAIT_S = 600  # the first operations compile
NUM_STEPS = 3
SMALL: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_layers": 2, "head_dim": 16, "intermediate_size": 48}
WIDE = {**SMALL, "hidden_size": 768}  # whose products are large enough to be divided among threads
EXPERTS = {"family": "qwen3_moe", "num_experts": 8}
EVEN = {**SMALL, "intermediate_size": 64}  # which the kernels in C++ multiply in bfloat16
CASES = [
    pytest.param({**SMALL, **EXPERTS}, {}, id="experts"),
    pytest.param({**WIDE, **EXPERTS}, {}, id="experts-wide"),
    pytest.param({**SMALL}, {}, id="dense"),
    pytest.param({**WIDE}, {"kernels": "reference"}, id="dense-XLA"),
    pytest.param({**EVEN}, {"dtype": "bfloat16"}, id="dense-bfloat16"),
]


@dataclass(frozen=True, slots=True)
class Tenant:
    rank: int
    loss: str
    lengths: tuple[int, ...]
    prompt: int

    def data(self, seed: int) -> list[tinker.Datum]:
        rng = np.random.default_rng([self.rank, len(self.lengths), seed])
        return [_datum(rng, length, self.loss) for length in self.lengths]


TENANTS = [
    Tenant(8, "cross_entropy", (20, 300), prompt=3),
    Tenant(4, "ppo", (64,), prompt=70),
    Tenant(16, "cross_entropy", (600, 5), prompt=130),
    Tenant(8, "ppo", (130, 130, 130), prompt=10),
    Tenant(1, "cross_entropy", (33,), prompt=200),
    Tenant(32, "ppo", (512, 90), prompt=64),
]


def _datum(rng: np.random.Generator, length: int, loss: str) -> tinker.Datum:
    tokens = rng.integers(3, SMALL["vocab_size"], length + 1).tolist()
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = rng.uniform(size=length).tolist()
    else:
        inputs |= {"logprobs": rng.uniform(-8, -4, length).tolist(), "advantages": rng.normal(size=length).tolist()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@pytest.fixture
def server(
    request: pytest.FixtureRequest, tmp_path: Path, shape: dict[str, Any], settings: dict[str, Any]
) -> Iterator[RunningServer]:
    write_tiny_model(tmp_path / "model", TinyShape(**shape))
    limits = {"max_context_tokens": 1024, "max_batch_tokens": 1024, "decode_slots": 4}
    backend = {"plugin": "jax", **limits, **settings}
    model = ModelSettings.model_validate({"name": "tiny", "path": tmp_path / "model", "backend": backend})
    with as_shipped(), running_server(tmp_path / "data", models=[model]) as running:
        yield running


def live(server: RunningServer, number: int, everybody: threading.Barrier) -> tuple[Any, ...]:
    """Train, score and sample; return everything that the tenant sees of numbers."""
    tenant = TENANTS[number]
    client = tinker.ServiceClient(base_url=server.url, api_key=f"tml-tenant-{number}")
    model = client.create_lora_training_client(base_model="tiny", rank=tenant.rank, seed=number).result(timeout=WAIT_S)
    seen: list[Any] = []
    for step in range(NUM_STEPS):
        everybody.wait(WAIT_S)
        passed = model.forward_backward(tenant.data(step), tenant.loss)
        stepped = model.optim_step(tinker.AdamParams(learning_rate=1e-2))
        output = passed.result(timeout=WAIT_S)
        seen.append((output.metrics, logprobs(output), stepped.result(timeout=WAIT_S).metrics))
    scored = logprobs(model.forward(tenant.data(NUM_STEPS), tenant.loss).result(timeout=WAIT_S))
    sampler = model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    everybody.wait(WAIT_S)
    prompt = np.random.default_rng(number).integers(3, SMALL["vocab_size"], tenant.prompt).tolist()
    answer = sampler.sample(
        tinker.ModelInput.from_ints(prompt),
        2,
        tinker.SamplingParams(max_tokens=20, seed=number),
        include_prompt_logprobs=True,
    ).result(timeout=WAIT_S)
    drawn = [(each.tokens, each.logprobs) for each in answer.sequences]
    client.close("success").result(timeout=WAIT_S)
    return seen, scored, drawn, answer.prompt_logprobs


def together(server: RunningServer, numbers: Sequence[int]) -> list[tuple[Any, ...]]:
    barrier = threading.Barrier(len(numbers))
    with ThreadPoolExecutor(len(numbers)) as threads:
        return list(threads.map(lambda number: live(server, number, barrier), numbers))


@pytest.mark.parametrize(("shape", "settings"), CASES)
def test_company_on_a_fresh_server_changes_no_bit(server: RunningServer) -> None:
    everyone = range(len(TENANTS))
    in_company = together(server, everyone)
    for number in everyone:
        (alone,) = together(server, [number])
        assert in_company[number] == alone, f"{TENANTS[number]} differs in company"
