"""What tenants have used, as the SDK, its command line and Prometheus see it."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import httpx
import pytest
import tinker
from tinker import types

from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import TOKENS, datum

KEYS = [
    {"key": "tml-ann", "tenant": "ann"},
    {"key": "tml-bob", "tenant": "bob"},
    {"key": "tml-root", "tenant": "root", "admin": True},
]


class Worked(NamedTuple):
    trained: int
    sampled: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("data"), server={"api_keys": KEYS}) as running:
        yield running


@pytest.fixture(scope="module")
def worked(server: RunningServer) -> Worked:
    """Ann trains, scores, samples and saves."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
    model = service.create_lora_training_client(base_model="toy", rank=4, seed=1).result(timeout=300)
    passes = [model.forward_backward([datum()], "cross_entropy"), model.forward([datum()] * 2, "cross_entropy")]
    stepped = model.optim_step(tinker.AdamParams(learning_rate=0.01))
    failed = model.forward_backward([datum()], "no_such_loss")  # type: ignore[arg-type]  # on purpose
    for each in (*passes, stepped):
        each.result(timeout=300)
    with pytest.raises(tinker.RequestFailedError):
        failed.result(timeout=300)
    path = model.save_weights_for_sampler("a").result(timeout=300).path
    sampler = service.create_sampling_client(model_path=path).result(timeout=300)
    params = types.SamplingParams(max_tokens=3, seed=1)
    answer = sampler.sample(types.ModelInput.from_ints(TOKENS), 2, params).result(timeout=300)
    service.close("success").result(timeout=300)
    return Worked(datum().model_input.length, sum(len(sequence.tokens) for sequence in answer.sequences))


def billed(server: RunningServer, key: str) -> dict[tuple[str | None, str], int]:
    """Return the sums by tenant and type: the work may have taken from one hour to the next."""
    admin = tinker.AdminClient(base_url=server.url, api_key=key)
    now = datetime.now(UTC)
    usage = admin.get_billing_usage(now - timedelta(days=2), now + timedelta(days=1)).result(timeout=300)
    assert {event.base_model for event in usage.data} <= {"toy"}
    assert all(event.bucket_end - event.bucket_start == timedelta(hours=1) for event in usage.data)
    sums: Counter[tuple[str | None, str]] = Counter()
    for event in usage.data:
        info = event.event_info
        assert not isinstance(info, types.StorageBillingEvent)
        number = info.count if isinstance(info, types.CheckpointBillingEvent) else info.token_count
        sums[event.user_id, info.type] += number
    return sums


def test_the_sdk_sees_what_was_used(server: RunningServer, worked: Worked) -> None:
    expected = {
        ("ann", "training"): worked.trained,
        ("ann", "sampling_prefill"): 2 * worked.trained + len(TOKENS),
        ("ann", "sampling_sample"): worked.sampled,
        ("ann", "checkpoint"): 1,
    }
    assert billed(server, "tml-ann") == expected
    assert billed(server, "tml-root") == expected
    assert billed(server, "tml-bob") == {}


def test_the_sdk_sees_what_is_kept(server: RunningServer, worked: Worked) -> None:
    del worked
    kept = {
        key: tinker.AdminClient(base_url=server.url, api_key=key).get_current_checkpoint_storage_usage()
        for key in ("tml-ann", "tml-root", "tml-bob")
    }
    (of_ann,) = kept["tml-ann"].result(timeout=300).data
    assert (of_ann.user_name, of_ann.checkpoint_count) == ("ann", 1)
    assert of_ann.size_bytes > 0
    assert of_ann.size_gigabytes == pytest.approx(of_ann.size_bytes / 1e9)
    assert kept["tml-root"].result(timeout=300).data == [of_ann]
    assert kept["tml-bob"].result(timeout=300).data == []


def test_prometheus_sees_it_with_a_key(server: RunningServer, worked: Worked) -> None:
    url = f"{server.url}/api/v1/usage/metrics"
    assert httpx.get(url, timeout=300).status_code == 401
    text = httpx.get(url, headers={"X-API-Key": "tml-root"}, timeout=300).text
    assert (
        f'tinsmith_usage_tokens_total{{base_model="toy",kind="trained",tenant="ann"}} {float(worked.trained)}' in text
    )
    assert 'tinsmith_usage_checkpoints_total{base_model="toy",tenant="ann"} 1.0' in text
    seconds = 'tinsmith_usage_engine_seconds_total{base_model="toy",tenant="ann"} '
    assert float(text.split(seconds)[1].split("\n")[0]) > 0
    assert 'tinsmith_checkpoints_kept{project="",tenant="ann"} 1.0' in text
    assert "ann" not in httpx.get(url, headers={"X-API-Key": "tml-bob"}, timeout=300).text
    assert "ann" not in httpx.get(f"{server.url}/metrics", timeout=300).text


@pytest.mark.parametrize("hours", [-1, 0, 24 * 32])
def test_a_window_must_make_sense(server: RunningServer, hours: int) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    window = {"starting_on": start.isoformat(), "ending_before": (start + timedelta(hours=hours)).isoformat()}
    answer = httpx.get(
        f"{server.url}/api/v1/billing/usage/events", params=window, headers={"X-API-Key": "tml-ann"}, timeout=300
    )
    assert answer.status_code == 400
    assert "must end after it starts and last at most 31 days" in answer.json()["detail"]
