"""How long a tenant's sample takes beside a neighbour whose requests are legal and as dear as can be.

The neighbour always has many of them waiting. Had it as many ordinary ones, the tenant would have its share of the
sampler and of the machine. What the neighbour asks instead may take twice of that from it at most, and what is being
computed when the tenant's request comes: one of the neighbour's requests, however many of them wait. Everything is
measured in one run, in turns.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from itertools import count
from statistics import median
from typing import Any

import pytest
from attacker import Attacker
from campaign_server import ATTACKER, BASE_MODEL, NEIGHBOUR, CampaignServer, campaign_server
from dear_requests import CONTEXT, DEPTH, KINDS, ORDINARY, asked, busy_neighbour

from tinsmith.testing import TinyShape, write_tiny_model

pytestmark = [pytest.mark.malice, pytest.mark.timeout(1800)]

TIMES = 10
LATE = 2  # of ten, which the machine may have held up
FAIR = 2.0

_JAX = {"plugin": "jax", "max_context_tokens": CONTEXT, "max_batch_tokens": CONTEXT, "max_lora_rank": 8}
_VLLM = {
    "plugin": "vllm",
    "max_model_len": CONTEXT,
    "max_num_seqs": 16,
    "kv_cache_bytes": 32 << 20,
    "max_loras": 2,
    "max_cpu_loras": 2,
    "max_lora_rank": 8,
}
SERVED: Mapping[str, Mapping[str, Any]] = {
    "toy": {"backend": {"plugin": "toy", "max_context_tokens": CONTEXT}},
    "jax": {"backend": {**_JAX, "decode_slots": 8}},
    "vllm": {"backend": {**_JAX, "warm_up": False}, "model": {"sampler": _VLLM}},
}


@pytest.fixture(scope="module", params=SERVED)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CampaignServer]:
    """A server whose sampler is the toy, jax or vllm."""
    sampler: str = request.param
    directory = tmp_path_factory.mktemp(sampler)
    served = dict(SERVED[sampler])
    if sampler != "toy":
        pytest.importorskip(f"tinsmith_{sampler}")
        write_tiny_model(directory / "model", TinyShape(hidden_size=64, intermediate_size=96, num_layers=2))
        served["model"] = {**served.get("model", {}), "path": str(directory / "model")}
    with campaign_server(directory, **served) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_neighbour_asks_holds_up_nobody(server: CampaignServer, kind: str) -> None:
    with Attacker(server.url, NEIGHBOUR, BASE_MODEL) as tenant, Attacker(server.url, ATTACKER, BASE_MODEL) as other:
        own, its, numbers = tenant.new_sampler(), other.new_sampler(), count(10**6)

        def own_times() -> list[float]:
            return [_took(tenant, own, next(numbers), ORDINARY) for _ in range(TIMES)]

        _took(tenant, own, next(numbers), ORDINARY)  # programs for such a one are compiled
        dear = median(_took(other, its, next(numbers), KINDS[kind]) for _ in range(3))
        alone, ordinary = own_times(), list[float]()
        with busy_neighbour(server.url, ATTACKER, BASE_MODEL, ORDINARY):
            ordinary += own_times()
        with busy_neighbour(server.url, ATTACKER, BASE_MODEL, KINDS[kind]) as ended:
            found = sorted(own_times())[-1 - LATE]
        with busy_neighbour(server.url, ATTACKER, BASE_MODEL, ORDINARY):
            ordinary += own_times()
    bound = FAIR * median(ordinary) + dear
    figures = (
        f"{kind}: a sample takes {1000 * median(alone):.0f} ms alone, {1000 * median(ordinary):.0f} ms beside {DEPTH} "
        f"ordinary ones, {1000 * found:.0f} ms beside {DEPTH} of these, of which one alone takes {1000 * dear:.0f} ms: "
        f"{found / bound:.2f} of the bound; they ended as {dict(ended)}"
    )
    print(f"\n{figures}", file=sys.stderr)
    assert set(ended) == {"200"}, figures
    assert found <= bound, figures


def _took(sender: Attacker, sampler_id: str, number: int, fields: Mapping[str, Any]) -> float:
    """Return how many seconds a sample took that must succeed."""
    began = time.monotonic()
    accepted = sender.send(asked(sampler_id, number, **fields))
    result = sender.result(accepted.request_id or "")
    assert (result.status, result.error_category) == (200, None), (accepted, result)
    return time.monotonic() - began
