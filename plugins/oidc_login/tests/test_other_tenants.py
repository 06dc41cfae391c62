"""Whoever signs in learns nothing of what another tenant has, on any route: see `route_walk`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from oidc_served import API, CLIENT, SECRET, Browser, RealProvider
from route_walk import Visitor, walk

from tinsmith.testing.harness import RunningServer, running_server

KEY = "tml-of-the-operator"
OWN_PAGE = {"sec-fetch-site": "same-origin"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, RealProvider]]:
    with RealProvider.running() as provider:
        login = {"plugin": "oidc", "issuer": provider.issuer, "client_id": CLIENT, "client_secret": SECRET}
        login["audience"] = API
        keys = {"api_keys": [{"key": KEY, "tenant": "ops"}]}
        directory: Path = tmp_path_factory.mktemp("data")
        with running_server(directory, engines=False, login=login, server=keys) as running:
            provider.serve(running.url)
            yield running, provider


_THOROUGH: Final = [pytest.param(way, marks=pytest.mark.thorough) for way in ("token", "key")]


@pytest.mark.parametrize("way", ["cookie", *_THOROUGH])
def test_another_tenants_run_does_not_exist_on_any_route(server: tuple[RunningServer, RealProvider], way: str) -> None:
    running, provider = server
    with Browser(running.url) as ann, Browser(running.url) as other:
        ann.sign_in("ann")
        ann.http.headers.update(OWN_PAGE)
        if way == "cookie":
            other.sign_in("bob")
            other.http.headers.update(OWN_PAGE)
        else:
            secret = KEY if way == "key" else provider.access_token()
            other.http.headers["authorization"] = f"Bearer {secret}"
        owner = Visitor(ann.http, running.url)
        walk(owner, Visitor(other.http, running.url), owner.things(running))
