"""The dearest request of every route: as many bytes, values or rows as it may have, again and again."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
import wire_bodies
from attacker import Attacker, Request

MB: Final = 1_000_000
WORDS: Final = "the quick brown fox jumps over the lazy dog and comes back again "

PAGES: Final = ("/", "/chat", "/docs", "/openapi.json", "/metrics")

Ids = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Dear:
    """Requests for one route."""

    name: str
    requests: tuple[Request, ...]

    @property
    def of_core(self) -> bool:
        return self.name.split()[1].startswith("/api/v1/")


def objects(attacker: Attacker) -> Ids:
    """Make one of each thing that routes are about."""
    model_id = attacker.new_model()
    session_id = model_id.partition(":")[0]
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": attacker.base_model}
    sampler_id = attacker.ask("create_sampling_session", **sampling)["sampling_session_id"]
    saved = attacker.ask("save_weights_for_sampler", model_id=model_id, seq_id=1, path="saved")["request_id"]
    path = orjson.loads(attacker.result(saved).content)["path"]
    points = [{"step": step, "values": {f"m{n}": 0.5 for n in range(20)}} for step in range(500)]
    attacker.ask(f"runs/{model_id}/metrics", points=points)
    return {
        "session_id": session_id,
        "model_id": model_id,
        "base_model": attacker.base_model,
        "sampling_session_id": sampler_id,
        "sampler_id": sampler_id,
        "request_id": saved,
        "tinker_path": path,
        "model_path": path,
        "source_path": path,
        "kind": "sampler_weights",
        "name": "saved",
        "run": model_id,
    }


def every_route(description: Mapping[str, Any], ids: Ids) -> Iterator[Dear]:
    """Yield one for each route that the server describes, and for its pages."""
    for path in PAGES:
        yield Dear(f"GET {path}", (Request(path, b"", method="GET"),))
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            filled = re.sub(r"\{(\w+)\}", lambda name: ids.get(name[1], "1"), path)
            if method == "get":
                yield Dear(f"GET {path}", (Request(filled + _query(operation, ids), b"", method="GET"),))
            else:
                yield Dear(f"{method.upper()} {path}", tuple(_bodies(method.upper(), path, filled, ids)))


def _query(operation: Mapping[str, Any], ids: Ids) -> str:
    """Ask for as much as the route gives."""
    asked = []
    for each in operation.get("parameters", ()):
        if each["in"] == "query":
            name, schema = each["name"], each.get("schema", {})
            kinds = [schema, *schema.get("anyOf", ())]
            most = next((kind["maximum"] for kind in kinds if "maximum" in kind), None)
            if name in ids:
                asked.append(f"{name}={ids[name]}")
            elif most is not None and name in {"limit", "max_points", "iterations"}:
                asked.append(f"{name}={most}")
            elif each.get("required"):
                asked.append(f"{name}=1")
    return "?" + "&".join(asked) if asked else ""


def _bodies(method: str, path: str, filled: str, ids: Ids) -> Iterator[Request]:
    """Yield large bodies: of text, and of numbers. Most routes refuse them, but read them first."""
    named = {name: ids[name] for name in ("model_id", "session_id", "sampling_session_id", "request_id") if name in ids}
    if path.endswith("completions") or "/messages" in path:
        yield from _texts(method, filled, path)
    elif path.endswith(("/asample", "/forward_backward")):
        numbers = wire_bodies.with_list({**named, "seq_id": 1}, "x", b"12345", 20 * MB)
        yield Request(filled, numbers, method=method)
    else:
        yield Request(filled, orjson.dumps({**named, "x": "a" * (MB // 2)}), method=method)
        yield Request(filled, wire_bodies.with_list(named, "x", b"1", MB // 2), method=method)


def _texts(method: str, filled: str, path: str) -> Iterator[Request]:
    long = WORDS * (3 * MB // len(WORDS))
    for said in ([long], ["hi"] * 8_000):
        if path.endswith("chat/completions") or "/messages" in path:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": each} for each in said]}
        else:
            asked = {"prompt": said}
        yield Request(filled, orjson.dumps({"model": "toy", "max_tokens": 1, **asked}), method=method)
    if path.endswith("/completions") and "chat" not in path:
        yield Request(filled, b'{"model":"toy","prompt":[' + b"1," * (2 * MB) + b"1]}", method=method)
