"""A model that is unloaded gives its place to one that waits, while its session goes on."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import running_server

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # what the SDK leaves open is its business


def test_a_model_that_is_unloaded_gives_its_place_to_the_next(tmp_path: Path) -> None:
    backend = PluginSection.model_validate({"plugin": "toy", "max_models": 1})
    models, quotas = [ModelSettings(name="toy", backend=backend)], {"kept_places": 0}
    with running_server(tmp_path, models=models, quotas=quotas) as server:

        def post(path: str, key: str = "tml-ann", **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{server.url}/api/v1/{path}", json=body, headers=headers, timeout=300)

        service = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
        first = service.create_lora_training_client(base_model="toy", rank=4).result()
        model_id = first.get_info().model_id
        following = service.create_lora_training_client(base_model="toy", rank=4)
        assert post("unload_model", key="tml-bob", model_id=model_id).status_code == 404, "it is not his"
        submitted = post("unload_model", model_id=model_id, type="unload_model").json()
        assert post("unload_model", model_id=model_id).json() == submitted, "a repeat is the same request"
        assert following.result().get_info().model_id != model_id, "while the session goes on"
        result = post("retrieve_future", request_id=submitted["request_id"]).json()
        assert result == {"model_id": model_id}
        refused = post("optim_step", model_id=model_id, seq_id=9, adam_params={})
        assert (refused.status_code, "has been unloaded" in refused.text) == (400, True)
        service.close("success").result()
