"""Walks over all routes of the API's description as somebody else, with the ids of what another tenant has.

Neither the answers may tell whether an id exists, nor what the store is asked about it, which takes the time.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import httpx
from sqlalchemy import Engine, event

from tinsmith.testing.harness import RunningServer
from tinsmith.testing.store_records import a_checkpoint

LEAST_SHOWN: Final = 10
"""Routes that answer the owner otherwise than others: with fewer, the walk would show nothing."""

GLANCED: Final = ("/retrieve_future", "/cancel_future")
"""Routes of results, which a store finds faster than it finds nothing. Request ids are random: nobody can try them."""

Ids = Mapping[str, str]
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    schema: Schema
    schemas: Schema

    @property
    def body(self) -> Schema | None:
        content = self.schema.get("requestBody", {}).get("content", {}).get("application/json")
        return None if content is None else content["schema"]

    @property
    def names(self) -> Iterator[str]:
        """Yield the names that may stand for something that belongs to somebody."""
        yield from re.findall(r"\{(\w+)\}", self.path)
        yield from (each for each in self._properties(self.body or {}) if re.search(r"_ids?$|path$", each))

    def _properties(self, schema: Schema, within: tuple[str, ...] = ()) -> Iterator[str]:
        if (reference := schema.get("$ref")) is not None and reference not in within:
            yield from self._properties(self.schemas[reference.rpartition("/")[2]], (*within, reference))
        for inner in (*filter(None, [schema.get("items")]), *schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from self._properties(inner, within)
        for name, inner in schema.get("properties", {}).items():
            yield name
            yield from self._properties(inner, within)


@dataclass(frozen=True, slots=True)
class _Request:
    path: str
    query: dict[str, Any]
    body: Any

    @classmethod
    def of(cls, operation: Operation, ids: Ids) -> Self:
        def value(name: str, schema: Schema) -> Any:
            return _value(name, schema, operation.schemas, ids)

        query = {
            each["name"]: value(each["name"], each.get("schema", {}))
            for each in operation.schema.get("parameters", ())
            if each["in"] == "query" and (each.get("required") or each["name"] == "run")
        }
        return cls(
            path=re.sub(r"\{(\w+)\}", lambda name: str(value(name[1], {"type": "string"})), operation.path),
            query=query,
            body=None if operation.body is None else value("", operation.body),
        )


@dataclass(frozen=True, slots=True)
class Visitor:
    http: httpx.Client
    url: str

    def operations(self) -> Iterator[Operation]:
        """Yield those of the API. A signed link is for whoever has it."""
        described = self.http.get(f"{self.url}/openapi.json").json()
        for path, operations in described["paths"].items():
            if path.startswith("/api/v1/") and "{signature}" not in path:
                for method, operation in operations.items():
                    yield Operation(method, path, operation, described["components"]["schemas"])

    def answers(self, operation: Operation, ids: Ids) -> list[tuple[int, str]]:
        """Return what this caller gets for these ids, and for ids of nothing, without the ids themselves.

        Nothing if the operation takes none of them.
        """
        sent = [_Request.of(operation, each) for each in (ids, made_up(ids))]
        if sent[0] == sent[1]:
            return []
        found = []
        for request, each in zip(sent, (ids, made_up(ids)), strict=True):
            answer = self.http.request(
                operation.method, f"{self.url}{request.path}", params=request.query, json=request.body
            )
            text = answer.text
            for name in sorted(each.values(), key=len, reverse=True):
                text = text.replace(name, "ID")
            found.append((answer.status_code, re.sub(r"\d{4}-\d\d-\d\dT[^\"]+|[0-9a-f]{16,}", "", text)))
        return found

    def things(self, server: RunningServer) -> Ids:
        """Make something of each kind, and return the ids."""

        def post(path: str, body: object) -> Any:
            answer = self.http.post(f"{self.url}/api/v1/{path}", json=body)
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
        checkpoint = replace(
            a_checkpoint("one", model_id=run["model_id"]),
            path=f"tinker://{run['model_id']}/weights/one",
            tenant=server.call(server.store.get_run(run["model_id"])).tenant,
        )
        server.call(server.store.add_checkpoint(checkpoint))
        return {
            "session": session,
            "model": run["model_id"],
            "request": run["request_id"],
            "sampl": sampler["sampling_session_id"],
            "share": link["share_id"],
            "key": post("auth/apikeys", {"name": "of the walk"})["key_id"],
        }


def walk(owner: Visitor, other: Visitor, ids: Ids) -> None:
    """Let another tenant try every route with the owner's ids: each must seem not to exist."""
    shown = 0
    for operation in owner.operations():
        about = operation.method, operation.path
        with _asked_of_the_store() as asked:
            answers = other.answers(operation, ids)
        if not answers:
            continue
        assert answers[0] == answers[1], about
        if not operation.path.endswith(GLANCED):
            assert (*about, _about(asked, ids)) == (*about, _about(asked, made_up(ids)))
        shows = operation.method == "get" and not operation.path.endswith("run_events")  # which is a stream
        own = owner.answers(operation, ids) if shows else answers
        shown += own[0] != answers[0]
    assert shown >= LEAST_SHOWN


def made_up(ids: Ids) -> Ids:
    return {kind: re.sub(r"[0-9a-f]{8}", "0" * 8, each) for kind, each in ids.items()}


@contextmanager
def _asked_of_the_store() -> Iterator[list[tuple[str, str]]]:
    """Collect the statements and their parameters. The server runs in this process."""
    asked: list[tuple[str, str]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_more: Any) -> None:
        asked.append((statement, repr(parameters)))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def _about(asked: Iterable[tuple[str, str]], ids: Ids) -> list[str]:
    return [statement for statement, parameters in asked if any(each in parameters for each in ids.values())]


def id_in(name: str, ids: Ids) -> str | None:
    """Return which of the ids a parameter or a field of this name takes."""
    if "path" in name:
        return f"tinker://{ids['model']}/weights/one"
    kind = "model" if name == "run" else name
    return next((each for part, each in ids.items() if part in kind), None)


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
    if (found := id_in(name, ids)) is not None:
        return found
    return "weights" if name == "kind" else "one"
