"""One key learns nothing of what another one's tenant has, on any route: see `route_walk`."""

from collections.abc import Iterator
from typing import Final

import httpx
import pytest
from route_walk import Visitor, id_in, walk

from tinsmith.testing.harness import RunningServer, running_server

LABELS: Final = {"project_id", "project_ids", "destination_project_id"}
NUMBERS: Final = {"seq_id"}
PARTS: Final = {"kind", "name"}  # of a checkpoint's id, beside its model's
OF_THE_TENANT: Final = {"upload_id"}  # looked up in the tenant's own directory: see test_uploads.py


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = {"api_keys": [{"key": f"tml-{name}", "tenant": name} for name in ("ann", "bob")]}
    with running_server(tmp_path_factory.mktemp("data"), engines=False, server=keys) as running:
        yield running


@pytest.fixture
def ann(server: RunningServer) -> Iterator[Visitor]:
    with httpx.Client(headers={"x-api-key": "tml-ann"}, timeout=300) as http:
        yield Visitor(http, server.url)


@pytest.fixture
def bob(server: RunningServer) -> Iterator[Visitor]:
    with httpx.Client(headers={"x-api-key": "tml-bob"}, timeout=300) as http:
        yield Visitor(http, server.url)


def test_what_another_tenant_has_does_not_exist_on_any_route(server: RunningServer, ann: Visitor, bob: Visitor) -> None:
    walk(ann, bob, ann.things(server))


def test_the_walk_fills_in_every_id(server: RunningServer, ann: Visitor) -> None:
    """If a route has an id of a new kind, let `Visitor.things` make one, or list it above."""
    ids = ann.things(server)
    unfilled = {name for each in ann.operations() for name in each.names if id_in(name, ids) is None}
    assert unfilled == LABELS | NUMBERS | PARTS | OF_THE_TENANT
