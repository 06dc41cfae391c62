"""Through the SDK, with its default flags: of each family, FSDP trains attention, MLP and head, and vLLM samples."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinker
from fsdp_harness import forking
from vllm_harness import SHAPES, TRAINERS, VOCAB, prompt, settings

from tinsmith.settings import ModelSettings
from tinsmith.testing import write_tiny_model
from tinsmith.testing.harness import running_server
from tinsmith.testing.sdk_data import datum, logprobs, step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,  # test_vllm_sdk.py samples what JAX trained, and test_vllm_parity.py what FSDP did
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # connections that the SDK leaves to the collector
]

AGREE = 1e-3  # what is promised between two engines in float32
WAIT_S = 600
FAMILIES = ("qwen2", "llama", "qwen3", "mistral")
CLASSES = (
    "Phi3ForCausalLM",  # joins queries, keys and values
    "Cohere2ForCausalLM",  # vLLM's windows are longer
    "Qwen2MoeForCausalLM",  # a shared expert
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolLM3ForCausalLM",  # vLLM computes with the layers of transformers
)


@pytest.mark.parametrize("family", [*FAMILIES, *CLASSES])
def test_default_flags_train_save_and_sample(family: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    path = tiny_models.get(family, tmp_path / "model")
    if family in CLASSES:
        write_tiny_model(path, replace(SHAPES["llama"], family=family))
    model = {
        "name": f"tiny/{family}",
        "path": path,
        "backend": {"plugin": "fsdp", **TRAINERS["fsdp"]},
        "sampler": {"plugin": "vllm", **settings()},
    }
    with ExitStack() as stack:
        stack.enter_context(forking())
        data_dir = tmp_path / "data"
        data_dir.mkdir()
        server = stack.enter_context(running_server(data_dir, models=[ModelSettings.model_validate(model)]))
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-families")
        client = service.create_lora_training_client(base_model=f"tiny/{family}", rank=4).result(timeout=WAIT_S)
        tokens = np.random.default_rng(0).integers(3, VOCAB, 24).tolist()
        for _ in range(3):
            step(client, [datum(tokens)], learning_rate=0.01)
        sampler = client.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
        start = prompt(1).tolist()
        params = tinker.SamplingParams(max_tokens=16, seed=3, stop=[])
        for sequence in sampler.sample(tinker.ModelInput.from_ints(start), 2, params).result(timeout=WAIT_S).sequences:
            whole = [*start, *sequence.tokens]
            trained = logprobs(client.forward([datum(whole)], "cross_entropy").result(timeout=WAIT_S))[0]
            np.testing.assert_allclose(sequence.logprobs, trained[-16:], atol=AGREE, rtol=0)
        service.close("success").result(timeout=WAIT_S)
