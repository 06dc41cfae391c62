"""Checkpoints through the unmodified SDK: save, resume, list, publish, expire, delete, download."""

import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import httpx
import pyrage
import pytest
import tinker

from tinsmith.testing.harness import RunningServer
from tinsmith.testing.sdk_data import datum, ragged, step


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    created = client.create_lora_training_client(base_model="toy", rank=4, seed=1, user_metadata={"run": "a"})
    return created.result(timeout=300)


def losses(model: tinker.TrainingClient, seeds: range) -> list[float]:
    return [step(model, ragged(2, seed)).metrics["loss:sum"] for seed in seeds]


def test_a_run_resumes_bit_for_bit(
    model: tinker.TrainingClient, new_client: Callable[[], tinker.ServiceClient]
) -> None:
    losses(model, range(2))
    path = model.save_state("middle").result(timeout=300).path
    expected = losses(model, range(2, 5))
    resumed = new_client().create_training_client_from_state_with_optimizer(path).result(timeout=300)
    assert resumed.get_info().lora_rank == 4
    assert losses(resumed, range(2, 5)) == expected


def test_without_the_optimizer_the_moments_start_afresh(
    model: tinker.TrainingClient, new_client: Callable[[], tinker.ServiceClient]
) -> None:
    losses(model, range(2))
    path = model.save_state("middle").result(timeout=300).path
    expected = losses(model, range(2, 5))
    resumed = new_client().create_training_client_from_state(path).result(timeout=300)
    continued = losses(resumed, range(2, 5))
    assert continued[0] == expected[0]
    assert continued[1:] != expected[1:]


def test_a_state_loads_into_an_existing_model(model: tinker.TrainingClient) -> None:
    path = model.save_state("start").result(timeout=300).path
    expected = losses(model, range(3))
    with pytest.warns(FutureWarning):
        loading = model.load_state_with_optimizer(path)
    loading.result(timeout=300)
    assert losses(model, range(3)) == expected


def test_a_name_is_used_once_unless_overwritten(model: tinker.TrainingClient) -> None:
    model.save_state("x").result(timeout=300)
    model.save_weights_for_sampler("x").result(timeout=300)  # names are per kind
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        model.save_state("x").result(timeout=300)
    model.save_state("x", overwrite=True).result(timeout=300)
    with pytest.raises(tinker.RequestFailedError, match=r"'\.\./x' is not allowed"):
        model.save_state("../x").result(timeout=300)


def test_the_rest_client_sees_and_changes_checkpoints(model: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    step(model, [datum()])
    state = model.save_state("one", ttl_seconds=7200, user_metadata={"k": "v"}).result(timeout=300).path
    sampler = model.save_weights_for_sampler("one").result(timeout=300).path
    run_id = model.get_info().model_id
    listed = {each.tinker_path: each for each in rest.list_checkpoints(run_id).result(timeout=300).checkpoints}
    assert listed.keys() == {state, sampler}
    assert listed[state].checkpoint_id == "weights/one"
    assert listed[state].checkpoint_type == "training"
    assert listed[state].user_metadata == {"k": "v"}
    assert (listed[state].size_bytes or 0) > 0
    remaining = (listed[state].expires_at or datetime.max.replace(tzinfo=UTC)) - datetime.now(UTC)
    assert timedelta(hours=1) < remaining <= timedelta(hours=2)

    rest.set_checkpoint_ttl_from_tinker_path(state, None).result(timeout=300)
    for _ in range(2):
        rest.publish_checkpoint_from_tinker_path(state).result(timeout=300)
    mine = rest.list_user_checkpoints().result(timeout=300)
    assert mine.cursor is not None
    assert mine.cursor.total_count == 2
    published = next(each for each in mine.checkpoints if each.tinker_path == state)
    assert published.public
    assert published.expires_at is None
    for _ in range(2):
        rest.unpublish_checkpoint_from_tinker_path(state).result(timeout=300)

    run = rest.get_training_run(run_id).result(timeout=300)
    assert run.user_metadata == {"run": "a"}
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == state
    assert run.last_sampler_checkpoint is not None
    info = rest.get_weights_info_by_tinker_path(state).result(timeout=300)
    assert (info.base_model, info.lora_rank) == ("toy", 4)

    rest.delete_checkpoint_from_tinker_path(state).result(timeout=300)
    rest.delete_checkpoint(run_id, "sampler_weights/one").result(timeout=300)
    assert rest.list_checkpoints(run_id).result(timeout=300).checkpoints == []
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(state).result(timeout=300)


def test_others_load_what_is_published_and_nothing_else(
    model: tinker.TrainingClient, rest: tinker.RestClient, toy_server: RunningServer
) -> None:
    path = model.save_state("shared").result(timeout=300).path
    with tinker.ServiceClient(base_url=toy_server.url, api_key="tml-a-stranger") as stranger:
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            stranger.create_training_client_from_state(path).result(timeout=300)
        rest.publish_checkpoint_from_tinker_path(path).result(timeout=300)
        theirs = stranger.create_training_client_from_state(path).result(timeout=300)
        step(theirs, [datum()])
        foreign = tinker.RestClient(base_url=toy_server.url, api_key="tml-a-stranger")
        with pytest.raises(tinker.NotFoundError):
            foreign.delete_checkpoint_from_tinker_path(path).result(timeout=300)


def test_an_export_is_downloaded_by_signed_links(model: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = model.save_weights_external("adapter").result(timeout=300).path
    answer = rest.get_external_weights_urls(path).result(timeout=300)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= answer.urls.keys()
    for url in answer.urls.values():
        with urllib.request.urlopen(url, timeout=300) as file:  # no key
            assert int(file.headers["Content-Length"]) == len(file.read())
    forged = answer.urls["adapter_config.json"].replace("adapter_config.json", "adapter_model.safetensors")
    assert httpx.get(forged, timeout=300).status_code == 401
    assert answer.expires > datetime.now(UTC)
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=300)
    assert httpx.get(answer.urls["adapter_config.json"], timeout=300).status_code == 404


def test_a_published_export_is_downloaded_by_others(
    model: tinker.TrainingClient, rest: tinker.RestClient, toy_server: RunningServer
) -> None:
    path = model.save_weights_external("adapter").result(timeout=300).path
    stranger = tinker.RestClient(base_url=toy_server.url, api_key="tml-a-stranger")
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        stranger.get_external_weights_urls(path).result(timeout=300)
    rest.publish_checkpoint_from_tinker_path(path).result(timeout=300)
    urls = stranger.get_external_weights_urls(path).result(timeout=300).urls
    with urllib.request.urlopen(urls["adapter_config.json"], timeout=300) as file:
        assert b'"r": 4' in file.read()
    rest.unpublish_checkpoint_from_tinker_path(path).result(timeout=300)
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        stranger.get_external_weights_urls(path).result(timeout=300)


def test_overwriting_a_published_checkpoint_keeps_it_published(
    model: tinker.TrainingClient, rest: tinker.RestClient, toy_server: RunningServer
) -> None:
    """Publishing belongs to the path. The expiry time and the metadata belong to what was saved there."""
    saved = model.save_state("shared", ttl_seconds=7200, user_metadata={"step": "1"}).result(timeout=300)
    rest.publish_checkpoint_from_tinker_path(saved.path).result(timeout=300)
    step(model, [datum()])
    model.save_state("shared", overwrite=True, user_metadata={"best": "yes"}).result(timeout=300)
    (listed,) = rest.list_checkpoints(model.get_info().model_id).result(timeout=300).checkpoints
    assert listed.public
    assert listed.expires_at is None
    assert listed.user_metadata == {"best": "yes"}
    with tinker.ServiceClient(base_url=toy_server.url, api_key="tml-a-stranger") as stranger:
        stranger.create_training_client_from_state(saved.path).result(timeout=300)

    rest.delete_checkpoint_from_tinker_path(saved.path).result(timeout=300)
    model.save_state("shared").result(timeout=300)  # a new checkpoint under an old name
    (listed,) = rest.list_checkpoints(model.get_info().model_id).result(timeout=300).checkpoints
    assert not listed.public


def test_a_closed_session_shows_in_the_rest_client(
    new_client: Callable[[], tinker.ServiceClient], rest: tinker.RestClient
) -> None:
    client = new_client()
    model = client.create_lora_training_client(base_model="toy", rank=2).result(timeout=300)
    model_id = model.get_info().model_id
    session_id = model_id.split(":")[0]
    assert rest.get_session(session_id).result(timeout=300).training_run_ids == [model_id]
    client.close("success").result(timeout=300)
    assert session_id in rest.list_sessions().result(timeout=300).sessions


def test_an_export_is_encrypted_for_its_recipients(
    model: tinker.TrainingClient, client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    step(model, [datum()])
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]
    keys = [str(each.to_public()) for each in identities]
    plain = model.save_weights_external("plain").result(timeout=300).path
    secret = model.save_weights_external("secret", age_encryption_recipients=keys).result(timeout=300)
    expected = {name: contents(url) for name, url in rest.get_external_weights_urls(plain).result().urls.items()}
    urls = rest.get_external_weights_urls(secret.path).result().urls
    assert urls.keys() == {f"{name}.age" for name in expected}
    for name, url in urls.items():
        found = contents(url)
        assert expected[name.removesuffix(".age")] not in found
        for identity in identities:
            assert pyrage.decrypt(found, [identity]) == expected[name.removesuffix(".age")]
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(found, [pyrage.x25519.Identity.generate()])
    with pytest.raises(tinker.RequestFailedError, match="'age1x' is no public key of age"):
        model.save_weights_external("x", age_encryption_recipients=["age1x"]).result(timeout=300)


def contents(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return bytes(answer.read())
