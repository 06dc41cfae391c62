"""FSDP ranks take turns with a sampler, through the unmodified SDK: the numbers are those of ranks that never sleep."""

import gc
from pathlib import Path
from typing import Any

import pytest
import tinker
from fsdp_harness import forking

from tinsmith.settings import ModelSettings
from tinsmith.testing import TinyShape, write_tiny_model
from tinsmith.testing.harness import running_server
from tinsmith.testing.sdk_data import TOKENS, logprobs, ragged

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # connections that the SDK leaves to the collector
]

WAIT_S = 300
ROUNDS = 2


def trained(data_dir: Path, model: dict[str, object], *, turns: bool) -> tuple[list[Any], int]:
    """Train between samples from the toy, which is another model. Return what the client saw, and changes of turns."""
    settings = ModelSettings.model_validate({**model, "turns": {"enabled": turns}})
    seen: list[Any] = []
    with forking(), running_server(data_dir, models=[settings]) as server:
        with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
            training = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result(timeout=WAIT_S)
            sampler = service.create_sampling_client(base_model="tiny").result(timeout=WAIT_S)
            params = tinker.SamplingParams(max_tokens=3, seed=1, stop=[])
            for number in range(ROUNDS):
                passed = training.forward_backward(ragged(3, number), "cross_entropy").result(timeout=WAIT_S)
                drawn = sampler.sample(tinker.ModelInput.from_ints(TOKENS), 1, params).result(timeout=WAIT_S)
                stepped = training.optim_step(tinker.AdamParams(learning_rate=0.01)).result(timeout=WAIT_S)
                seen += [logprobs(passed), stepped.metrics, drawn.sequences[0].tokens]
            training.save_state("end").result(timeout=WAIT_S)
        (engine,) = server.call(server.store.list_engines())
        return seen, 0 if engine.turn is None else engine.turn.changes


def test_ranks_that_sleep_between_their_turns_train_the_same_bits(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", TinyShape(num_layers=2))
    model = {
        "name": "tiny",
        "path": str(tmp_path / "model"),
        "backend": {"plugin": "fsdp", "device": "cpu", "nproc_per_node": 1, "max_context_tokens": 256},
        "sampler": {"plugin": "toy"},
    }
    expected, never = trained(tmp_path / "apart", model, turns=False)
    found, changes = trained(tmp_path / "turns", model, turns=True)
    assert found == expected
    assert never == 0
    assert changes >= 2 * ROUNDS
    gc.collect()  # here, where what the SDK has left open is ignored
