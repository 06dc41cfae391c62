"""An adapter that PEFT made, imported, trained on and sampled from through the SDK: its logprobs are PEFT's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from few_programs import FEW_PROGRAMS, SHAPE
from typer.testing import CliRunner

from tinsmith.commands.cli import build_group
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import running_server
from tinsmith.testing.sdk_data import datum, logprobs, step
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

KEY = "tml-import"
TOKENS = list(range(3, 43))
WAIT_S = 600
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("imports") / "a" / "tiny"
    write_tiny_model(directory, SHAPE)
    return directory


@pytest.fixture(scope="module")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model in PEFT, with a random adapter, and where the adapter was saved."""
    peft = pytest.importorskip("peft")  # here: it takes longer to import than all tests take to collect
    directory = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(directory)
    return adapted, directory


@pytest.fixture(scope="module")
def served(
    base: Path, adapted: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[tinker.ServiceClient, list[str]]]:
    data_dir = tmp_path_factory.mktemp("data")
    plugins = Plugins.load()
    arguments = ["import", adapted[1], "--base-model", base, "--name", "mine", "--api-key", KEY, "--data-dir", data_dir]
    done = CliRunner().invoke(build_group(plugins), ["checkpoint", *map(str, arguments)], obj=plugins)
    assert done.exit_code == 0, done.output
    options = {"plugin": "jax", "warm_up": False, **FEW_PROGRAMS}
    model = ModelSettings(name=str(base), path=base, backend=PluginSection.model_validate(options))
    with running_server(data_dir, models=[model]) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        yield client, done.stdout.split()
        client.close("success").result(timeout=300)


def of_peft(adapted: tuple[Any, Path]) -> np.ndarray[Any, Any]:
    """Return the logprobs of TOKENS[1:]."""
    with torch.no_grad():
        scores = torch.log_softmax(adapted[0](torch.tensor([TOKENS])).logits[0, :-1], dim=-1)
    return scores.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()  # type: ignore[no-any-return]


def test_training_goes_on_from_the_adapter(
    served: tuple[tinker.ServiceClient, list[str]], adapted: tuple[Any, Path]
) -> None:
    client, paths = served
    model = client.create_training_client_from_state(paths[0]).result(timeout=WAIT_S)
    scored = model.forward([datum(TOKENS)], "cross_entropy").result(timeout=WAIT_S)
    np.testing.assert_allclose(logprobs(scored)[0], of_peft(adapted), rtol=0, atol=1e-4)
    step(model, [datum(TOKENS)])
    trained = model.forward([datum(TOKENS)], "cross_entropy").result(timeout=WAIT_S)
    assert np.mean(logprobs(trained)[0]) > np.mean(logprobs(scored)[0])


def test_sampling_serves_the_adapter(served: tuple[tinker.ServiceClient, list[str]], adapted: tuple[Any, Path]) -> None:
    client, paths = served
    sampler = client.create_sampling_client(model_path=paths[1]).result(timeout=WAIT_S)
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result(timeout=WAIT_S)
    np.testing.assert_allclose(np.array(scored[1:], np.float64), of_peft(adapted), rtol=0, atol=1e-4)
