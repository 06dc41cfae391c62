"""Each family of the jax backend through the SDK with its defaults: steps, saves, samples and the gate.

One server has the models of all tests that are chosen. docs/reference/models.md has the other pairs of plugins.
"""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from few_programs import FEW_PROGRAMS
from typer.testing import CliRunner

from tinsmith.commands import cli
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum, logprobs, step
from tinsmith_checkpoints.huggingface import TINY_CLASSES
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_jax.families import built_in

pytestmark = pytest.mark.slow

WAIT_S = 900  # the first operations compile
SAMPLES, DRAWN = 8, 6
QUICK = "Olmo3ForCausalLM"
"""Its programs are few and compile quickly, and the kernels in C++ have none of them."""
OTHERS = sorted((set(built_in()) & TINY_CLASSES.keys()) - {QUICK})
CLASSES = [QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("families")
    chosen = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {item.callspec.params["class_name"] for item in chosen}
    backend = PluginSection.model_validate({"plugin": "jax", "warm_up": False, **FEW_PROGRAMS, "max_lora_rank": 32})
    models = []
    for name in sorted(names):
        shape = TinyShape(family=name, vocab_size=512, num_layers=2, hidden_size=64, intermediate_size=96)
        write_tiny_model(root / name, shape)
        models.append(ModelSettings(name=name, path=root / name, backend=backend))
    with running_server(root / "data", models=models) as running:
        yield running


@pytest.mark.parametrize("class_name", CLASSES)
def test_a_family_trains_saves_and_samples_with_the_defaults(
    server: RunningServer, class_name: str, api_key: str
) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=api_key)
    try:
        client = service.create_lora_training_client(base_model=class_name).result(timeout=WAIT_S)
        data = [datum(np.random.default_rng(length).integers(5, 60, length + 1).tolist()) for length in (70, 31, 7)]
        losses = [step(client, data, learning_rate=5e-3).metrics["loss:sum"] for _ in range(5)]
        assert losses[-1] < losses[0]
        client.save_state("state").result(timeout=WAIT_S)
        path = client.save_weights_for_sampler("kept").result(timeout=WAIT_S).path
        sampler = service.create_sampling_client(model_path=path).result(timeout=WAIT_S)
        prompt, params = [*range(9, 29)], tinker.SamplingParams(max_tokens=DRAWN, seed=3, stop=[])
        asked = tinker.ModelInput.from_ints(prompt)
        drawn = sampler.sample(asked, SAMPLES, params).result(timeout=WAIT_S).sequences
        whole = [datum([*prompt, *each.tokens]) for each in drawn]
        trained = logprobs(client.forward(whole, "cross_entropy").result(timeout=WAIT_S))
        client.save_weights_for_sampler("again").result(timeout=WAIT_S)  # by now nothing compiles
        model_id = client.get_info().model_id
    finally:
        service.close("success").result(timeout=WAIT_S)
    assert len(drawn) == SAMPLES
    for one, other in zip(drawn, trained, strict=True):
        np.testing.assert_allclose(np.array(one.logprobs), np.array(other[-DRAWN:]), rtol=0, atol=1e-4)
    assert verdict(server, model_id) == "consistent"


def verdict(server: RunningServer, model_id: str) -> str:
    """Return what the consistency gate says of the last save."""
    plugins, place = Plugins.load(), str(server.settings.server.data_dir)
    shown = CliRunner().invoke(
        cli.build_group(plugins), ["runs", "show", model_id, "--json", "--data-dir", place], obj=plugins,
        catch_exceptions=False,
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    saves = [each for each in json.loads(shown.stdout)["operations"] if each["kind"] == "save_for_sampler"]
    found: str = saves[-1]["notes"][-1]
    return found
