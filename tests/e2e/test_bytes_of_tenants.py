"""Bytes for nobody: each request that writes is sent at its largest, and what it adds to the disk is its tenant's.

No engine runs, so that nothing else writes. What engines write with a result counts in the same transaction.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from tinsmith.server.plugin_routes import Branch
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server

API: Final = "/api/v1"
NAME: Final = "n" * 1024
METADATA: Final = {"note": "m" * 30_000}
LORA: Final = {"rank": 4, "train_mlp": False}
MODULES: Final = {"model.layers.0.self_attn.q_proj": (16, 16), "lm_head": (64, 16)}
TENSORS: Final = "adapter_model.safetensors"
PROMPT: Final = {"chunks": [{"type": "encoded_text", "tokens": list(range(60))}]}
PASS: Final = {
    "loss_fn": "cross_entropy",
    "data": [{"model_input": PROMPT, "loss_fn_inputs": {"target_tokens": {"data": list(range(60)), "dtype": "int64"}}}],
}
LOGIN: Final = {"plugin": "oidc", "issuer": "https://provider.invalid", "client_id": "t", "client_secret": "x" * 32}
ROW_BYTES: Final = 4096
"""A row of ids, times and names. It counts for nobody, and the number of such rows has a bound of its own."""

BOUNDED: Final = {
    f"PUT {API}/uploads/{{stamp}}/{{grant}}/{{signature}}/{{name:path}}": "four unfinished uploads, for an hour",
}
"""Routes whose bytes count for nobody, and what bounds them."""

NOTHING: Final = {
    f"DELETE {API}/auth/apikey/me": "deletes the key that it comes with",
    "POST /login/logout": "a row of an id and a time, for each session of a browser",
    "POST /login/end": "a row of an id and a time, for each account",
    f"POST {API}/forward": "refused by name",
    f"POST {API}/create_custom_loss": "refused by name",
    "POST /anthropic/api/v1/messages": "waits for its sample, which is written as by asample",
    "POST /v1/completions": "waits for its sample",
    "POST /v1/chat/completions": "waits for its sample",
    "POST /oai/api/v1/completions": "waits for its sample",
    "POST /oai/api/v1/chat/completions": "waits for its sample",
    "POST /anthropic/api/v1/messages/count_tokens": "the toy model has no tokenizer; it asks no store",
    f"POST {API}/retrieve_future": "waits for an engine; it only reads",
    f"POST {API}/retrieve_futures": "waits for an engine; it only reads",
}
"""Routes that are not sent, and why."""


@dataclass
class Tenant:
    server: RunningServer
    http: httpx.Client
    sent: set[str] = field(default_factory=set)
    seq_id: int = 0

    def usage(self) -> int:
        (own,) = self.http.get(f"{API}/usage/disk").json()["data"]
        return int(own["total_bytes"])

    def send(self, route: str, body: Any = None, content: bytes | None = None, **names: str) -> Any:
        """Send a request, and find what it has added to the disk in the usage of its tenant."""
        method, _, path = route.partition(" ")
        for name, value in names.items():
            path = path.replace(f"{{{name}}}", value)
        before, counted = on_disk(self.server), self.usage()
        answer = self.http.request(method, path, json=body, content=content)
        assert answer.status_code in {200, 204}, (route, answer.text)
        added, counts = on_disk(self.server) - before, self.usage() - counted
        if route not in BOUNDED:
            assert added - counts <= ROW_BYTES, f"{route} has added {added} bytes, of which {counts} are its tenant's"
        self.sent.add(route)
        return answer.json() if answer.content else None

    def numbered(self) -> dict[str, Any]:
        self.seq_id += 1
        return {"seq_id": self.seq_id}


def on_disk(server: RunningServer) -> int:
    """Return the bytes of all rows, and of all files beside the database."""
    data_dir = server.settings.data_dir
    files = [each for each in data_dir.root.rglob("*") if each.is_file() and not each.name.startswith("tinsmith.db")]
    return sum(each.stat().st_size for each in files) + rows(data_dir.database)


def rows(database: Path) -> int:
    with closing(sqlite3.connect(database)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        found = 0
        for (table,) in tables:
            columns = [each[1] for each in connection.execute(f"PRAGMA table_info({table})")]
            size = " + ".join(f"coalesce(length(CAST({each} AS BLOB)), 0)" for each in columns)
            found += connection.execute(f"SELECT coalesce(sum({size}), 0) FROM {table}").fetchone()[0]
    return found


@pytest.fixture(scope="module")
def tenant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    directory = tmp_path_factory.mktemp("bytes")
    (directory / "model").mkdir()
    shapes = {**MODULES, "model.embed_tokens": (64, 16)}
    base = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(base, directory / "model" / "model.safetensors")
    toy = PluginSection.model_validate({"plugin": "toy"})
    model = ModelSettings(name="toy", path=directory / "model", backend=toy)
    server = {"api_keys": [{"key": "tml-ann", "tenant": "ann"}], "public_url": "https://tinsmith.example"}
    with (
        running_server(directory / "data", models=[model], server=server, login=LOGIN, engines=False) as running,
        httpx.Client(base_url=running.url, headers={"X-API-Key": "tml-ann"}, timeout=300) as http,
    ):
        yield Tenant(running, http)


def upload(tenant: Tenant) -> str:
    """Return the path of a checkpoint."""
    body = {"base_model": "toy", "lora_config": LORA, "destination_project_id": NAME}
    upload = tenant.send(f"POST {API}/external_weights_upload_start", body)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
    tensors = {}
    for name, (size_out, size_in) in MODULES.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = np.ones((4, size_in), np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = np.ones((size_out, 4), np.float32)
    for name, content in (("adapter_config.json", json.dumps(config).encode()), (TENSORS, save(tensors))):
        *_, stamp, grant, signature, rest = upload["urls"][name]["url"].split("/", 9)
        tenant.send(
            f"PUT {API}/uploads/{{stamp}}/{{grant}}/{{signature}}/{{name:path}}",
            content=content,
            **{"stamp": stamp, "grant": grant, "signature": signature, "name:path": rest},
        )
    return str(
        tenant.send(f"POST {API}/external_weights_upload_finish", {"upload_id": upload["upload_id"]})["tinker_path"]
    )


def send_all(tenant: Tenant) -> None:
    send, api = tenant.send, API
    described = {"user_metadata": METADATA, "display_name": NAME, "project_id": NAME, "sdk_version": NAME}
    session = send(f"POST {api}/create_session", {"tags": [NAME] * 100, **described})["session_id"]
    send(f"POST {api}/session_heartbeat", {"session_id": session})
    send(f"PUT {api}/sessions/{{session_id}}/project", {"project_id": NAME[1:]}, session_id=session)
    created = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": LORA}
    run = send(f"POST {api}/create_model", {**created, "user_metadata": METADATA})
    model = {"model_id": run["model_id"]}
    send(f"POST {api}/forward_backward", {**model, **tenant.numbered(), "forward_backward_input": PASS})
    send(f"POST {api}/optim_step", {**model, **tenant.numbered(), "adam_params": {}})
    named = {**model, "path": NAME, "user_metadata": METADATA}
    send(f"POST {api}/save_weights", {**named, **tenant.numbered()})
    send(f"POST {api}/save_weights_for_sampler", {**named, **tenant.numbered()})
    send(f"POST {api}/save_weights_external", {**named, **tenant.numbered()})
    path = upload(tenant)
    send(f"POST {api}/load_weights", {**model, **tenant.numbered(), "path": path, "optimizer": False})
    sampler = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "toy"}
    sampler_id = send(f"POST {api}/create_sampling_session", sampler)["sampling_session_id"]
    send(f"POST {api}/join_sampling_session", {"sampling_session_id": sampler_id})
    sample = {"prompt": PROMPT, "sampling_params": {"max_tokens": 1, "stop": ["s" * 16_000]}}
    request = send(f"POST {api}/asample", {"sampling_session_id": sampler_id, "seq_id": 1, **sample})["request_id"]
    send(f"POST {api}/cancel_future", {"request_id": request})
    for name, body in (
        ("get_info", model),
        ("weights_info", {"tinker_path": path}),
        ("sessions/search", {"owner": {"type": "own"}}),
        ("checkpoints/search", {"owner": {"type": "own"}}),
        ("client/config", {"sdk_version": NAME}),
        ("client/dynamic_config", {}),
        ("telemetry", {"session_id": session, "events": [{"note": "t" * 100_000}]}),
        ("auth/token", {}),
    ):
        send(f"POST {api}/{name}", body)
    points = [{"step": step, "values": {f"{NAME[:100]}{each}": 0.5 for each in range(50)}} for step in range(20)]
    send(f"POST {api}/runs/{{model_id}}/metrics", {"points": points}, **model)
    rewards = {f"{each:032x}": 0.5 for each in range(10_000)}
    send(f"POST {api}/runs/{{model_id}}/rewards", {"step": 0, "rewards": rewards}, **model)
    link = send(f"POST {api}/runs/{{model_id}}/share_links", {}, **model)["share_id"]
    send(f"DELETE {api}/runs/{{model_id}}/share_links/{{share_id}}", **model, share_id=link)
    key = send(f"POST {api}/auth/apikeys", {"name": NAME[:200]})["key_id"]
    send(f"DELETE {api}/auth/apikeys/{{key_id}}", key_id=key)
    copied = send(f"POST {api}/copy_weights", {"source_path": path, "destination_project_id": NAME})["tinker_path"]
    of = dict(zip(("model_id", "kind", "name"), copied.removeprefix("tinker://").split("/"), strict=True))
    route = f"{api}/training_runs/{{model_id}}/checkpoints/{{kind}}/{{name}}"
    send(f"PUT {route}/ttl", {"ttl_seconds": 3600}, **of)
    send(f"POST {route}/publish", **of)
    send(f"DELETE {route}/publish", **of)
    send(f"DELETE {route}", **of)
    send(f"POST {api}/unload_model", model)
    send(
        f"POST {api}/sessions/{{session_id}}/finish",
        {"reason": {"type": "success"}, "detail": NAME},
        session_id=session,
    )


def test_what_a_request_adds_to_the_disk_is_its_tenants(tenant: Tenant) -> None:
    send_all(tenant)
    routes = tenant.server.app.routes
    single = [each for route in routes for each in (route.routes() if isinstance(route, Branch) else (route,))]
    writing = {
        f"{method} {route.path}"
        for route in single
        for method in getattr(route, "methods", None) or ()
        if method not in {"GET", "HEAD"}
    }
    left = writing - tenant.sent - NOTHING.keys()
    assert not left, "send these at their largest above, or say in NOTHING why they write nothing"
