"""Whoever signs in learns nothing of another tenant's run, on any route: nor does a token or a key."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from oidc_served import API, CLIENT, SECRET, Browser, RealProvider

from tinsmith.testing.harness import RunningServer, running_server

KEY = "tml-of-the-operator"
OWN_PAGE = {"sec-fetch-site": "same-origin"}
LEAST_SHOWN: Final = 10
"""Routes that answer the owner otherwise than others: with fewer, the walk would show nothing."""

Ids = Mapping[str, str]
Schema = dict[str, Any]


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
        ids = _a_run(ann)
        if way == "cookie":
            other.sign_in("bob")
            other.http.headers.update(OWN_PAGE)
        else:
            secret = KEY if way == "key" else provider.access_token()
            other.http.headers["authorization"] = f"Bearer {secret}"
        shown = 0
        for method, path, operation, schemas in _operations(ann):
            answers = _answers(other.http, running.url, (method, path, operation, schemas), ids)
            assert answers[0] == answers[1], (method, path)
            shows = method == "get" and not path.endswith("run_events")  # which is a stream
            own = _answers(ann.http, running.url, (method, path, operation, schemas), ids) if shows else answers
            shown += own[0] != answers[0]
        assert shown >= LEAST_SHOWN


def _a_run(browser: Browser) -> Ids:
    def post(path: str, body: object) -> Any:
        answer = browser.http.post(f"{browser.url}/api/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    session = post("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
    lora = {"rank": 4}
    run = post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": lora})
    sampler = post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1, "base_model": "toy"}
    )
    points = [{"step": 0, "values": {"reward": 0.5}}]
    post(f"runs/{run['model_id']}/metrics", {"points": points})
    link = post(f"runs/{run['model_id']}/share_links", {})
    return {
        "session": session,
        "model": run["model_id"],
        "request": run["request_id"],
        "sampl": sampler["sampling_session_id"],
        "share": link["share_id"],
    }


def _operations(browser: Browser) -> Iterator[tuple[str, str, Schema, Schema]]:
    described = browser.get("/openapi.json").json()
    for path, operations in described["paths"].items():
        if path.startswith("/api/v1/") and "{signature}" not in path:
            for method, operation in operations.items():
                yield method, path, operation, described["components"]["schemas"]


def _answers(http: httpx.Client, url: str, route: tuple[str, str, Schema, Schema], ids: Ids) -> list[tuple[int, str]]:
    """Return what a caller gets for these ids, and for ids of nothing, without the ids themselves."""
    made_up = {kind: re.sub(r"[0-9a-f]{8}", "0" * 8, each) for kind, each in ids.items()}
    found = []
    for each in (ids, made_up):
        answer = _sent(http, url, route, each)
        text = answer.text
        for name in sorted(each.values(), key=len, reverse=True):
            text = text.replace(name, "ID")
        found.append((answer.status_code, re.sub(r"\d{4}-\d\d-\d\dT[^\"]+|[0-9a-f]{16,}", "", text)))
    return found


def _sent(http: httpx.Client, url: str, route: tuple[str, str, Schema, Schema], ids: Ids) -> httpx.Response:
    method, path, operation, schemas = route
    parameters = {each["name"]: each for each in operation.get("parameters", ())}
    concrete = re.sub(r"\{(\w+)\}", lambda name: str(_value(name[1], {"type": "string"}, schemas, ids)), path)
    query = {
        name: _value(name, each.get("schema", {}), schemas, ids)
        for name, each in parameters.items()
        if each["in"] == "query" and (each.get("required") or name in {"run"})
    }
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    body = None if content is None else _value("", content["schema"], schemas, ids)
    return http.request(method, f"{url}{concrete}", params=query, json=body)


def _value(name: str, schema: Schema, schemas: Schema, ids: Ids) -> Any:
    """Return a value that the schema allows, with the ids where their names stand for them."""
    if "$ref" in schema:
        return _value(name, schemas[schema["$ref"].rpartition("/")[2]], schemas, ids)
    if (several := schema.get("anyOf") or schema.get("oneOf")) is not None:
        return _value(name, several[0], schemas, ids)
    makers: dict[str, Callable[[], Any]] = {
        "object": lambda: {
            each: _value(each, of, schemas, ids)
            for each, of in schema.get("properties", {}).items()
            if each in schema.get("required", ()) or each.endswith("_id")
        },
        "array": lambda: [_value(name, schema.get("items", {}), schemas, ids)],
        "integer": lambda: max(1, schema.get("minimum", 1)),
        "number": lambda: 1.0,
        "boolean": lambda: True,
    }
    if schema.get("type") in makers:
        return makers[schema["type"]]()
    if "enum" in schema or "const" in schema:
        return schema.get("const") or schema["enum"][0]
    if schema.get("format") == "date-time":
        return "2026-01-01T00:00:00Z"
    if "path" in name:
        return f"tinker://{ids['model']}/weights/one"
    kind = "model" if name == "run" else name
    return next((each for part, each in ids.items() if part in kind), "weights" if name == "kind" else "one")
