"""A model whose client pauses gives its place to another tenant, and goes on bit for bit: through the SDK."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from few_programs import FEW_PROGRAMS, SHAPE

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.saved_files import read_saved
from tinsmith.testing.sdk_data import TOKENS, logprobs, ragged
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # what the SDK leaves open is its business

WAIT_S = 600  # the first operations compile
TOY = ModelSettings(name="m", backend=PluginSection.model_validate({"plugin": "toy", "max_models": 1}))


@pytest.fixture(scope="module", params=["toy", pytest.param("jax", marks=pytest.mark.thorough)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory, model = tmp_path_factory.mktemp("one-place"), TOY
    if request.param == "jax":
        options = {"plugin": "jax", "warm_up": False, **FEW_PROGRAMS, "max_models": 1}
        write_tiny_model(directory / "tiny", SHAPE)
        model = ModelSettings(name="m", path=directory / "tiny", backend=PluginSection.model_validate(options))
    with running_server(directory / "data", models=[model], quotas={"place_idle_s": 0.0}) as running:
        yield running


def fine_tune(url: str, in_between: Callable[[], None]) -> tuple[list[Any], str]:
    """Return what a client sees, and the path of what it saves. Between two calls of its own, others may do theirs."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-ann")
    training = service.create_lora_training_client(base_model="m", rank=4, seed=1).result(timeout=WAIT_S)
    seen: list[Any] = []
    in_between()
    for number in range(2):
        for window in range(2):
            passed = training.forward_backward(ragged(2, 2 * number + window), "cross_entropy")
            seen.append(logprobs(passed.result(timeout=WAIT_S)))
            in_between()
        stepped = training.optim_step(tinker.AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
        seen.append(stepped.result(timeout=WAIT_S).metrics)
        sampler = training.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
        in_between()
        params = tinker.SamplingParams(max_tokens=5, seed=number, temperature=1.0)
        drawn = sampler.sample(tinker.ModelInput.from_ints(TOKENS), num_samples=1, sampling_params=params)
        seen += [(each.tokens, each.logprobs) for each in drawn.result(timeout=WAIT_S).sequences]
    path: str = training.save_state("end").result(timeout=WAIT_S).path
    service.close("success").result(timeout=WAIT_S)
    return seen, path


def state_at(server: RunningServer, path: str) -> dict[str, bytes | int]:
    state = read_saved(server.settings.server.data_dir, path).state
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v, "gradients": state.gradients}
    arrays = {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}
    return {**arrays, "step": state.step}


def test_a_model_comes_back_bit_for_bit_from_every_pause(server: RunningServer) -> None:
    expected, path = fine_tune(server.url, lambda: None)
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-bob")
    other = service.create_lora_training_client(base_model="m", rank=2, seed=2).result(timeout=WAIT_S)

    def train_elsewhere() -> None:
        other.forward_backward(ragged(1), "cross_entropy").result(timeout=WAIT_S)
        runs, _ = server.call(server.store.list_runs(None, limit=10, offset=0))
        assert sorted(run.state for run in runs) == ["parked", "ready", "unloaded"]

    found, again = fine_tune(server.url, train_elsewhere)
    assert found == expected
    assert state_at(server, again) == state_at(server, path)
    service.close("success").result(timeout=WAIT_S)


def test_who_waits_learns_nothing_of_the_other_model(tmp_path: Path) -> None:
    """It is told how many places are taken, and neither whose model is there nor whether it is idle."""
    quotas = {"place_idle_s": 3600.0}
    with running_server(tmp_path, models=[TOY], quotas=quotas, server={"long_poll_s": 0.1}) as server:

        def post(key: str, path: str, **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{server.url}/api/v1/{path}", json=body, headers=headers, timeout=300)

        def new_model(key: str) -> tuple[str, str]:
            session_id = post(key, "create_session").json()["session_id"]
            model = {"session_id": session_id, "model_seq_id": 0, "base_model": "m", "lora_config": {"rank": 4}}
            return session_id, post(key, "create_model", **model).json()["request_id"]

        def told(request_id: str) -> str:
            answer = post("tml-bob", "retrieve_future", request_id=request_id, allow_metadata_only=True)
            assert answer.status_code == 408
            text: str = answer.json()["queue_state_reason"]
            return text

        owner, creation = new_model("tml-ann")
        server.call(server.store.wait_for(creation, WAIT_S))
        _, waiting = new_model("tml-bob")
        expected = (
            "1 of the 1 places for models of 'm' are taken, 0 of them by you, and 1 models wait for one; a place "
            "becomes free when a session ends or a model has been idle for 3600 s (quotas.place_idle_s); after 1800 s "
            "the request fails (quotas.place_wait_s)"
        )
        assert told(waiting) == expected
        model_id = f"{owner}:train:0"
        assert post("tml-ann", "optim_step", model_id=model_id, seq_id=2, adam_params={}).status_code == 200  # a gap
        assert told(waiting) == expected
        assert post("tml-bob", "get_info", model_id=model_id).status_code == 404
