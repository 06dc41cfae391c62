"""Uploads of PEFT adapters by plain HTTP, in the documented form of SDK 0.39 and 0.40, which no index here has."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from safetensors.numpy import save, save_file
from tinker import types

from tinsmith.checkpoints import uploads
from tinsmith.errors import NotFoundError
from tinsmith.operations import LoraConfig
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum, step

WAIT_S = 300
HIDDEN, VOCAB, RANK = 16, 64, 4  # the toy backend's, and the adapters'
MODULES = {"model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
HEAD_B = "base_model.model.lm_head.lora_B.weight"
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
LORA = {"rank": RANK, "train_mlp": False}
TENSORS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A toy model with a directory, with whose shapes an adapter is compared."""
    directory = tmp_path_factory.mktemp("uploads")
    shapes = {**MODULES, "model.layers.0.mlp.up_proj": (HIDDEN, HIDDEN), "model.embed_tokens": (VOCAB, HIDDEN)}
    (directory / "model").mkdir()
    base = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(base, directory / "model" / "model.safetensors")
    backend = PluginSection.model_validate({"plugin": "toy"})
    model = ModelSettings(name="toy", path=directory / "model", backend=backend)
    with running_server(directory / "data", models=[model]) as server:
        yield server


def http_of(server: RunningServer, key: str, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": key, **headers}, timeout=WAIT_S)


@pytest.fixture
def http(server: RunningServer, api_key: str) -> Iterator[httpx.Client]:
    with http_of(server, api_key) as client:
        yield client


@pytest.fixture
def client(server: RunningServer, api_key: str) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key=api_key)
    yield client
    client.close("success").result(timeout=WAIT_S)


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def weights(**changed: Any) -> bytes:
    rng = np.random.default_rng(1)
    found: dict[str, Any] = {}
    for module, (size_out, size_in) in MODULES.items():
        name = f"base_model.model.{module}.lora_"
        found[f"{name}A.weight"] = rng.normal(size=(RANK, size_in)).astype(np.float32)
        found[f"{name}B.weight"] = rng.normal(size=(size_out, RANK)).astype(np.float32)
    return save({**found, **changed})


def started(http: httpx.Client, **body: Any) -> Any:
    return ok(http.post("external_weights_upload_start", json={"base_model": "toy", "lora_config": LORA, **body}))


def put(url: str, content: Any) -> httpx.Response:
    """Without a key."""
    return httpx.put(url, content=content, timeout=WAIT_S)


def uploaded(http: httpx.Client, config: Any = None, content: bytes | None = None, **body: Any) -> str:
    upload = started(http, **body)
    for name, each in (
        ("adapter_config.json", json.dumps(config or CONFIG).encode()),
        (TENSORS, weights() if content is None else content),
    ):
        answer = put(upload["urls"][name]["url"], each)
        assert answer.status_code == 204, answer.text
    return str(upload["upload_id"])


def finish(http: httpx.Client, upload_id: str) -> httpx.Response:
    return http.post("external_weights_upload_finish", json={"upload_id": upload_id})


def test_an_uploaded_adapter_is_sampled_and_trained_on(
    server: RunningServer, http: httpx.Client, client: tinker.ServiceClient, api_key: str
) -> None:
    upload_id = uploaded(http, destination_project_id="p")
    path = ok(finish(http, upload_id))["tinker_path"]
    assert ok(finish(http, upload_id))["tinker_path"] == path, "a repeat"
    assert path.split("/")[3] == "external_weights"
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=8, temperature=0)
    sampled = client.create_sampling_client(model_path=path).result().sample(prompt, 1, params).result(WAIT_S)
    base = client.create_sampling_client(base_model="toy").result().sample(prompt, 1, params).result(WAIT_S)
    assert sampled.sequences[0].logprobs != base.sequences[0].logprobs, "the adapter is applied"
    model = client.create_training_client_from_state(path).result(timeout=WAIT_S)
    trained = model.save_weights_and_get_sampling_client().result(WAIT_S).sample(prompt, 1, params).result(WAIT_S)
    assert trained.sequences[0].logprobs == sampled.sequences[0].logprobs, "both have the same weights"
    step(model, [datum()])
    rest = tinker.RestClient(base_url=server.url, api_key=api_key)
    urls = rest.get_external_weights_urls(path).result(WAIT_S).urls
    config = httpx.get(urls["adapter_config.json"], timeout=WAIT_S).json()
    assert (config["r"], config["lora_alpha"]) == (RANK, 8), "PEFT can load it"
    (found,) = ok(http.post("checkpoints/search", json={"project_ids": ["p"]}))["checkpoints"]
    assert (found["tinker_path"], found["checkpoint_type"]) == (path, "external")


@pytest.mark.parametrize("header", ["x-sdk-version", "x-stainless-package-version"])
@pytest.mark.parametrize(("version", "is_text"), [("0.39.1", True), ("0.40.0", False), ("1.2.0", False)])
def test_links_have_the_form_that_the_sdk_takes(
    server: RunningServer, api_key: str, header: str, version: str, is_text: bool
) -> None:
    with http_of(server, api_key, **{header: version}) as http:
        urls = started(http)["urls"]
    assert urls.keys() == {"adapter_config.json", TENSORS}
    for url in urls.values():
        assert isinstance(url, str) if is_text else url.keys() == {"url", "headers"}


def test_a_file_may_come_in_pieces_and_again(http: httpx.Client) -> None:
    upload = started(http)
    urls = {name: each["url"] for name, each in upload["urls"].items()}
    assert put(urls["adapter_config.json"], b"{").status_code == 204
    assert put(urls["adapter_config.json"], iter([json.dumps(CONFIG).encode()])).status_code == 204
    refused = finish(http, upload["upload_id"])
    assert (refused.status_code, f"has no {TENSORS} yet" in refused.text) == (400, True), refused.text
    content = weights()
    assert put(urls[TENSORS], (content[at : at + 1000] for at in range(0, len(content), 1000))).status_code == 204
    ok(finish(http, upload["upload_id"]))
    after = put(urls[TENSORS], content)
    assert (after.status_code, "the upload is finished" in after.text) == (400, True)


def test_an_adapter_that_does_not_fit_is_refused_by_name(server: RunningServer, api_key: str) -> None:
    narrow, lost = np.ones((3, RANK), np.float32), np.full((VOCAB, RANK), np.nan, np.float32)
    cases: list[tuple[Any, bytes, Any, str]] = [
        (CONFIG, b"rubbish", LORA, TENSORS),
        ({**CONFIG, "use_dora": True}, weights(), LORA, "use_dora"),
        (CONFIG, weights(), {**LORA, "rank": 8}, "has rank 4"),
        (CONFIG, weights(), {**LORA, "train_unembed": False}, "train_unembed"),
        (CONFIG, weights(**{HEAD_B: narrow}), LORA, "[3, 4]"),
        (CONFIG, weights(**{HEAD_B: lost}), LORA, "not finite"),
    ]
    for number, (config, content, lora, words) in enumerate(cases):
        with http_of(server, f"{api_key}-{number}") as http:
            refused = finish(http, uploaded(http, config, content, lora_config=lora))
            assert (refused.status_code, words in refused.text) == (400, True), refused.text
            assert ok(http.get("checkpoints"))["checkpoints"] == []


def test_what_cannot_be_started(http: httpx.Client) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"base_model": "other"}, "no base model named 'other'"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank is 0"),
        ({"colour": "red"}, "colour"),
    ]
    for change, words in cases:
        body = {"base_model": "toy", "lora_config": LORA, **change}
        refused = http.post("external_weights_upload_start", json=body)
        assert (refused.status_code, words in refused.text) == (400, True), refused.text
    for _ in range(uploads.MOST_OPEN):
        started(http)
    refused = http.post("external_weights_upload_start", json={"base_model": "toy", "lora_config": LORA})
    assert "at most 4 uploads" in refused.text


def test_a_file_has_a_bound(http: httpx.Client) -> None:
    url = started(http)["urls"][TENSORS]["url"]
    refused = put(url, bytes(17 << 20))
    assert (refused.status_code, f"{TENSORS} is over" in refused.text) == (413, True)
    refused = put(url, (bytes(1 << 20) for _ in range(17)))
    assert (refused.status_code, f"{TENSORS} is over" in refused.text) == (413, True)


def test_an_upload_is_its_tenants_alone(server: RunningServer, http: httpx.Client, api_key: str) -> None:
    """A link is for one file of one upload, and others can neither finish an upload nor tell whether it is there."""
    upload, path = started(http), ok(finish(http, uploaded(http)))["tinker_path"]
    url = upload["urls"]["adapter_config.json"]["url"]
    for forged in (
        url.replace("adapter_config.json", TENSORS),
        url.replace(upload["upload_id"], started(http)["upload_id"]),
    ):
        assert put(forged, b"{}").status_code == 401
    assert httpx.get(url.replace("/uploads/", "/files/", 1), timeout=WAIT_S).status_code == 404
    with http_of(server, f"{api_key}-other") as other:
        told = []
        for upload_id in (upload["upload_id"], "0" * 32):
            refused = finish(other, upload_id)
            assert refused.status_code == 404
            told.append(refused.text.replace(upload_id, "it"))
        assert told[0] == told[1]
        session = ok(other.post("create_session", json={}))["session_id"]
        for route, body in (*opening(session, path), ("weights_info", {"tinker_path": path})):
            assert other.post(route, json=body).status_code == 404, route


def opening(session: str, path: str) -> tuple[tuple[str, dict[str, object]], ...]:
    return (
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}),
        ("load_weights", {"session_id": session, "model_seq_id": 9, "path": path, "optimizer": False}),
    )


def test_an_export_is_still_neither_sampled_nor_loaded(http: httpx.Client, client: tinker.ServiceClient) -> None:
    model = client.create_lora_training_client(base_model="toy", rank=RANK).result(timeout=WAIT_S)
    path = model.save_weights_external("x").result(timeout=WAIT_S).path
    for route, body in opening(model.get_info().model_id.split(":")[0], path):
        refused = http.post(route, json=body)
        assert (refused.status_code, "is an export, for use elsewhere" in refused.text) == (400, True), refused.text


def test_uploads_expire(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    announced = uploads.Announced(
        tenant="ann",
        base_model="toy",
        lora=LoraConfig(rank=RANK, seed=0),
        project_id=None,
        created_at=now,
        expires_at=now + timedelta(hours=1),
        max_bytes=1,
    )
    upload_id = uploads.begin(tmp_path, announced)
    uploads.sweep(tmp_path, now)
    assert uploads.find(tmp_path, "ann", upload_id)[1] == announced
    uploads.sweep(tmp_path, now + timedelta(hours=2))
    with pytest.raises(NotFoundError):
        uploads.find(tmp_path, "ann", upload_id)
