"""The table of what each route and operation costs, in docs/explanation/work-of-a-request.md, against the server."""

import re
from pathlib import Path

import pytest

from tinsmith.server.plugin_routes import Branch
from tinsmith.store.codec import OPERATION_TYPES
from tinsmith.testing.harness import running_server

PAGE = Path(__file__).parents[2] / "docs/explanation/work-of-a-request.md"
COLUMNS = 6
LOGIN = {"plugin": "oidc", "issuer": "https://provider.invalid", "client_id": "tinsmith", "client_secret": "x" * 32}


def table(title: str) -> list[list[str]]:
    """Return the cells of each row below a heading, without the table's head."""
    (section,) = re.findall(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def named(title: str) -> list[str]:
    return [name for row in table(title) for name in re.findall(r"`([^`]+)`", row[0])]


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Of the core and of all installed plugins."""
    server = {"public_url": "https://tinsmith.example"}
    with running_server(tmp_path_factory.mktemp("data"), engines=False, login=LOGIN, server=server) as running:
        routes = running.app.routes
    single = [each for route in routes for each in (route.routes() if isinstance(route, Branch) else (route,))]
    return {
        f"{method} {route.path}"
        for route in single
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD"
    }


def test_every_route_says_what_it_costs_and_where_that_is_bounded(routes: set[str]) -> None:
    """For a new route, add it to the row whose bounds it has, or add a row with its own."""
    rows = named("Routes")
    assert routes - set(rows) == set(), "routes without a row"
    assert set(rows) - routes == set(), "rows without a route"
    assert len(rows) == len(set(rows)), "routes with two rows"


def test_every_operation_says_what_it_costs_and_where_that_is_bounded() -> None:
    assert sorted(named("Operations")) == sorted(OPERATION_TYPES)


@pytest.mark.parametrize("title", ["Routes", "Operations"])
def test_every_row_fills_in_every_column(title: str) -> None:
    for row in table(title):
        assert len(row) == COLUMNS, row
        assert all(row), row


def test_the_settings_that_it_names_exist() -> None:
    reference = (PAGE.parents[1] / "reference/configuration.md").read_text()
    settings = set(re.findall(r"`((?:quotas|server)\.[a-z_.]+)`", PAGE.read_text()))
    assert settings
    unknown = {
        name for name in settings if f"`{name.rpartition('.')[2]}`" not in reference and f"`{name}`" not in reference
    }
    assert not unknown
