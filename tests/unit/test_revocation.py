"""What rests on a checkpoint or a key ends with it, at the next request, on every server of a store."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from tinsmith import operations as ops
from tinsmith.backend import BackendContext, Snapshot
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.engine.engine import Engine
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.server.live_keys import LiveKeys
from tinsmith.settings import ApiKey, KeySource, QuotaSettings, ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.engine_driver import WAIT_S, make_engine
from tinsmith.testing.harness import TOY

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENANTS = ("ann", "bob", "root")
SAMPLER, ADAPTER = "sampler_weights/shared", "external_weights/shared"


class WatchedBackend(ToyBackend):
    """The toy backend. It shows which snapshots are loaded, and can hold samples up."""

    def __init__(self, tmp_path: Path) -> None:
        losses = {loss.name: loss for loss in BUILTIN_LOSSES}
        context = BackendContext(model_name="toy", model_path=None, cache_dir=tmp_path, losses=losses)
        super().__init__(ToyConfig(), context)
        self.loaded: set[str] = set()
        self.sampling = asyncio.Event()
        self.may_sample = asyncio.Event()
        self.may_sample.set()

    def holds(self, path: str) -> bool:
        """Return whether a version of a checkpoint is loaded."""
        return any(snapshot_id.partition("~")[0] == path for snapshot_id in self.loaded)

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        self.loaded.add(snapshot.snapshot_id)
        await super().load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        self.loaded.discard(snapshot_id)
        await super().drop_snapshot(snapshot_id)

    async def sample(self, op: ops.Sample) -> Any:
        self.sampling.set()
        await self.may_sample.wait()
        return await super().sample(op)


class Client:
    """One tenant's client of one server."""

    def __init__(self, app: FastAPI, key: str) -> None:
        """The server: its `app`, in this process."""
        transport = httpx.ASGITransport(app=app)
        self.app, self.http = app, httpx.AsyncClient(transport=transport, base_url=URL, headers={"X-API-Key": key})

    async def post(self, route: str, /, **body: Any) -> dict[str, Any]:
        return ok(await self.http.post(route, json=body))

    async def result(self, request_id: str) -> httpx.Response:
        return await self.http.post("retrieve_future", json={"request_id": request_id}, timeout=WAIT_S)

    async def done(self, route: str, /, **body: Any) -> dict[str, Any]:
        """Submit an operation, and wait for it to succeed."""
        result = ok(await self.result((await self.post(route, **body))["request_id"]))
        assert "error" not in result, result
        return result

    async def sampler(self, path: str, number: int = 0) -> str:
        session_id = (await self.post("create_session"))["session_id"]
        body = {"session_id": session_id, "sampling_session_seq_id": number, "model_path": path}
        return str((await self.post("create_sampling_session", **body))["sampling_session_id"])

    async def asample(self, sampler: str, seq_id: int) -> httpx.Response:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": PARAMS}
        return await self.http.post("asample", json=body)

    async def samples(self, sampler: str, seq_id: int) -> bytes:
        """Sample, and return the result's bytes."""
        answer = await self.result(ok(await self.asample(sampler, seq_id))["request_id"])
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text
        return answer.content


PARAMS = {"max_tokens": 4, "seed": 3}
URL = "http://test/api/v1/"


def ok(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@dataclass
class Service:
    """Two servers and an engine on one store, as separate processes would open it."""

    data_dir: Path
    store: SqlStore
    backend: WatchedBackend
    clients: dict[str, tuple[Client, Client]]  # by tenant: one for each server

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        engine = await make_engine(self.store, self.backend, self.data_dir, sampler=self.backend)
        await engine.recover("killed", lambda _what, _share: None)
        task = asyncio.create_task(engine.run())
        try:
            yield engine
        finally:
            engine.stop()
            await asyncio.wait_for(task, WAIT_S)

    async def change(self, path: str, **fields: Any) -> None:
        await self.store.update_checkpoint(path, lambda record: replace(record, **fields))


@asynccontextmanager
async def server(data_dir: Path, tenants: Sequence[str]) -> AsyncIterator[dict[str, Client]]:
    """Yield clients of a new server by tenant."""
    keys = [ApiKey.model_validate({"key": f"tml-{each}", "tenant": each, "admin": each == "root"}) for each in tenants]
    settings = Settings(server=ServerSettings(data_dir=data_dir, api_keys=tuple(keys)), models=(TOY,))
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=data_dir))
    await store.open()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        app = await create_app(settings, store=store, plugins=Plugins.load())
        clients = {}
        for tenant in tenants:
            clients[tenant] = Client(app, f"tml-{tenant}")
            await stack.enter_async_context(clients[tenant].http)
        yield clients


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """One for all tests: each has a model of its own."""
    data_dir = tmp_path_factory.mktemp("service")
    store = SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=600.0), StoreContext(data_dir=data_dir))
    await store.open()
    async with server(data_dir, TENANTS) as one, server(data_dir, TENANTS) as two:
        clients = {tenant: (one[tenant], two[tenant]) for tenant in TENANTS}
        yield Service(data_dir, store, WatchedBackend(data_dir), clients)
    await store.close()


async def a_model(ann: Client) -> str:
    session_id = (await ann.post("create_session"))["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 2, "seed": 1}}
    return str((await ann.done("create_model", **body))["model_id"])


async def a_published_sampler(ann: Client) -> str:
    """Save a model of Ann's for sampling, publish it, and return its path."""
    model_id = await a_model(ann)
    saved = await ann.done("save_weights_for_sampler", model_id=model_id, seq_id=1, path="shared")
    await ann.http.post(f"{of(saved['path'])}/publish")
    return str(saved["path"])


def of(path: str) -> str:
    """Return the REST path of a checkpoint."""
    model_id, _, checkpoint_id = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{model_id}/checkpoints/{checkpoint_id}"


def assert_closed(answer: httpx.Response, path: str, why: str) -> None:
    """A 404, which the SDK raises at once instead of trying again."""
    assert answer.status_code == 404, answer.text
    assert f"its checkpoint '{path}' {why}" in answer.json()["detail"]


# Samplers -------------------------------------------------------------------------------------------------------------


async def test_unpublishing_ends_the_samplers_of_others_on_every_server(service: Service) -> None:
    ann, bob, root = (service.clients[tenant] for tenant in TENANTS)
    async with service.engine():
        path = await a_published_sampler(ann[0])
        own, others, admins = [await each[0].sampler(path) for each in (ann, bob, root)]
        before = await bob[1].samples(others, 0)
        await ann[1].http.delete(f"{of(path)}/publish")
        for each in bob:
            assert_closed(await each.asample(others, 1), path, "was unpublished by its owner")
            joined = await each.http.post("join_sampling_session", json={"sampling_session_id": others})
            assert_closed(joined, path, "was unpublished by its owner")
        assert await ann[0].samples(own, 0)  # its owner's go on, and those of administrators
        assert await root[1].samples(admins, 0)
        assert service.backend.holds(path)

        await ann[0].http.post(f"{of(path)}/publish")
        assert await bob[0].samples(others, 0) == before  # a repeat, with the result of the first


@pytest.mark.parametrize("end", ["deleted", "expired"])
async def test_the_end_of_a_checkpoint_ends_every_sampler_on_every_server(service: Service, end: str) -> None:
    ann, bob, root = (service.clients[tenant] for tenant in TENANTS)
    async with service.engine() as engine:
        path = await a_published_sampler(ann[0])
        samplers = [await each[0].sampler(path) for each in (ann, bob, root)]
        for each, sampler in zip((ann, bob, root), samplers, strict=True):
            await each[1].samples(sampler, 0)
        if end == "deleted":
            ok(await ann[1].http.delete(of(path)))
        else:
            await service.change(path, expires_at=datetime(2026, 1, 2, tzinfo=UTC))
        for each, sampler in zip((ann, bob, root), samplers, strict=True):
            why = "was deleted" if end == "deleted" else "expired at 2026-01-02 00:00:00 UTC"
            for client in each:
                assert_closed(await client.asample(sampler, 1), path, why)
        assert service.backend.holds(path)
        await engine.sampling.snapshots.drop_unused()  # what the engine does every half minute
        assert not service.backend.holds(path)


async def test_a_sampler_does_not_change_to_a_later_checkpoint_of_the_same_name(service: Service) -> None:
    ann, bob = service.clients["ann"], service.clients["bob"]
    async with service.engine():
        path = await a_published_sampler(ann[0])
        sampler = await bob[0].sampler(path)
        first = ok(await bob[0].asample(sampler, 0))["request_id"]
        before = await bob[0].result(first)
        ok(await ann[0].http.delete(of(path)))
        model_id = path.removeprefix("tinker://").split("/")[0]
        await ann[0].done("optim_step", model_id=model_id, seq_id=2, adam_params={"weight_decay": 0.5})
        await ann[0].done("save_weights_for_sampler", model_id=model_id, seq_id=3, path="shared")
        await ann[0].http.post(f"{of(path)}/publish")
        for each in bob:
            assert_closed(await each.asample(sampler, 1), path, "was replaced by a later one of the same name")
        again = await bob[1].sampler(path, 1)
        assert await bob[0].samples(again, 0)
        assert (await bob[0].result(first)).content == before.content  # results stay readable


@pytest.mark.parametrize("end", ["unpublished", "deleted", "expired"])
async def test_samples_that_have_not_begun_fail_with_the_reason(service: Service, end: str) -> None:
    ann, bob = service.clients["ann"], service.clients["bob"]
    async with service.engine():
        path = await a_published_sampler(ann[0])
    sampler = await bob[0].sampler(path)
    waiting = ok(await bob[0].asample(sampler, 0))["request_id"]
    match end:
        case "unpublished":
            await ann[1].http.delete(f"{of(path)}/publish")
        case "deleted":
            await service.store.delete_checkpoint(path)  # its files follow later
        case _:
            await service.change(path, expires_at=datetime.now(UTC) - timedelta(microseconds=1))
    async with service.engine():
        failed = ok(await bob[0].result(waiting))
    assert failed["category"] == "user"
    assert f"is closed: its checkpoint '{path}' " in failed["error"]
    assert end in failed["error"]


async def test_a_sample_that_runs_may_finish(service: Service) -> None:
    ann, bob = service.clients["ann"], service.clients["bob"]
    async with service.engine() as engine:
        path = await a_published_sampler(ann[0])
        sampler = await bob[0].sampler(path)
        service.backend.sampling.clear()
        service.backend.may_sample.clear()
        running = ok(await bob[0].asample(sampler, 0))["request_id"]
        await asyncio.wait_for(service.backend.sampling.wait(), WAIT_S)
        ok(await ann[0].http.delete(of(path)))
        await engine.sampling.snapshots.drop_unused()
        assert service.backend.holds(path)
        service.backend.may_sample.set()
        answer = await bob[0].result(running)
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text


# Loads and new models that wait ---------------------------------------------------------------------------------------


async def a_published_state(ann: Client) -> str:
    model_id = await a_model(ann)
    saved = await ann.done("save_weights", model_id=model_id, seq_id=1, path="shared")
    await ann.http.post(f"{of(saved['path'])}/publish")
    return str(saved["path"])


async def overwrite(ann: Client, path: str) -> None:
    model_id = path.removeprefix("tinker://").partition("/")[0]
    await ann.done("optim_step", model_id=model_id, seq_id=2, adam_params={"weight_decay": 0.5})
    await ann.done("save_weights", model_id=model_id, seq_id=3, path="shared", overwrite=True)


async def a_waiting_load(bob: Client, path: str) -> tuple[str, str]:
    """Submit a load behind a gap in the seq_ids. Return its model and its request_id."""
    model_id = await a_model(bob)
    load = {"model_id": model_id, "path": path, "seq_id": 2, "optimizer": True}
    return model_id, str((await bob.post("load_weights", **load))["request_id"])


async def close_the_gap(bob: Client, model_id: str) -> None:
    await bob.post("optim_step", model_id=model_id, seq_id=1, adam_params={})


WHY = {
    "unpublished": "was unpublished by its owner",
    "unpublished and overwritten": "was replaced by a later one of the same name",
    "published again": "was replaced by a later one of the same name",
    "expired": "expired at 2026-01-02 00:00:00 UTC",
    "deleted": "no checkpoint",
}


async def end_right(service: Service, path: str, end: str) -> None:
    ann = service.clients["ann"]
    if end in {"unpublished", "unpublished and overwritten", "published again"}:
        await ann[1].http.delete(f"{of(path)}/publish")
    if end in {"unpublished and overwritten", "published again"}:
        await overwrite(ann[0], path)
    if end == "published again":
        await ann[1].http.post(f"{of(path)}/publish")
    if end == "expired":
        await service.change(path, expires_at=datetime(2026, 1, 2, tzinfo=UTC))
    if end == "deleted":
        await service.store.delete_checkpoint(path)  # its files follow later


@pytest.mark.parametrize("end", WHY)
async def test_a_load_that_waits_has_no_more_right_than_when_it_runs(service: Service, end: str) -> None:
    ann, bob = service.clients["ann"][0], service.clients["bob"][0]
    async with service.engine():
        path = await a_published_state(ann)
        model_id, waiting = await a_waiting_load(bob, path)
        await end_right(service, path, end)
        await close_the_gap(bob, model_id)
        failed = ok(await bob.result(waiting))
    assert failed["category"] == "user"
    assert path in failed["error"]
    assert WHY[end] in failed["error"]


@pytest.mark.parametrize("end", ["unpublished", "expired", "deleted"])
async def test_a_new_model_that_waits_has_no_more_right_than_when_it_is_created(service: Service, end: str) -> None:
    ann, bob = service.clients["ann"][0], service.clients["bob"][0]
    async with service.engine():
        path = await a_published_state(ann)
    session_id = (await bob.post("create_session"))["session_id"]
    new = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    waiting = (await bob.post("load_weights", **new))["request_id"]
    await end_right(service, path, end)
    async with service.engine():
        failed = ok(await bob.result(waiting))
        assert failed["category"] == "user"
        assert WHY[end] in failed["error"]


@pytest.mark.parametrize("tenant", ["ann", "root"])
async def test_a_load_by_its_owner_or_an_administrator_may_wait(service: Service, tenant: str) -> None:
    """An owner gets the version that is there when it runs."""
    ann, reader = service.clients["ann"][0], service.clients[tenant][0]
    async with service.engine():
        path = await a_published_state(ann)
        model_id, waiting = await a_waiting_load(reader, path)
        await end_right(service, path, "unpublished and overwritten" if tenant == "ann" else "unpublished")
        await close_the_gap(reader, model_id)
        assert ok(await reader.result(waiting))["path"] == path


# Links ----------------------------------------------------------------------------------------------------------------


async def links(client: Client, path: str) -> list[str]:
    """Return the links of one file and of the archive."""
    files = ok(await client.http.get(f"{of(path)}/external_weights_urls"))["urls"]
    archive = ok(await client.http.get(f"{of(path)}/archive"))["url"]
    return [files["adapter_config.json"], archive]


async def statuses(clients: Sequence[Client], paths: Sequence[str]) -> set[tuple[int, str]]:
    """Download without a key from each server. Return the statuses, and why each was refused."""
    found = set()
    for client in clients:
        for path in paths:
            answer = await client.http.get(path, headers={"X-API-Key": ""})
            found.add((answer.status_code, "" if answer.is_success else answer.json()["detail"].partition("' ")[2]))
    return found


async def a_published_adapter(service: Service) -> str:
    ann = service.clients["ann"][0]
    async with service.engine():
        saved = await ann.done("save_weights_external", model_id=await a_model(ann), seq_id=1, path="shared")
    await ann.http.post(f"{of(saved['path'])}/publish")
    return str(saved["path"])


async def test_a_download_is_a_request_in_progress_of_whoever_made_its_link(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly it is read."""
    ann, bob = service.clients["ann"][0], service.clients["bob"][0]
    made = await links(bob, await a_published_adapter(service))
    app = bob.app
    monkeypatch.setattr(app.state.context.quotas, "settings", QuotaSettings(requests_in_progress=1))
    for link in made:
        sending, may_read = asyncio.Event(), asyncio.Event()
        scope = {
            "type": "http",
            "method": "GET",
            "path": httpx.URL(link).path,
            "query_string": b"",
            "headers": [],
            "extensions": {},
        }

        async def send(
            _message: dict[str, Any], sending: asyncio.Event = sending, may_read: asyncio.Event = may_read
        ) -> None:
            sending.set()
            await may_read.wait()

        download = asyncio.create_task(app(scope, asyncio.Event().wait, send))
        await sending.wait()
        refused = [await bob.http.get(link, headers={"X-API-Key": ""}), await bob.http.get("sessions")]
        assert [answer.status_code for answer in refused] == [429, 429]
        assert all("(quotas.requests_in_progress)" in answer.json()["detail"] for answer in refused)
        ok(await ann.http.get("sessions"))
        may_read.set()
        await download
        ok(await bob.http.get("sessions"))


async def test_links_end_with_what_they_rest_on_on_every_server(service: Service) -> None:
    ann, bob, root = (service.clients[tenant] for tenant in TENANTS)
    path = await a_published_adapter(service)
    mine, theirs, admins = [await links(each[0], path) for each in (ann, bob, root)]
    everywhere = (ann[0], ann[1])
    assert await statuses(everywhere, [*mine, *theirs, *admins]) == {(200, "")}
    await ann[1].http.delete(f"{of(path)}/publish")
    assert await statuses(everywhere, theirs) == {(404, "was unpublished by its owner")}
    assert await statuses(everywhere, [*mine, *admins]) == {(200, "")}
    await ann[1].http.post(f"{of(path)}/publish")
    assert await statuses(everywhere, theirs) == {(200, "")}

    now = datetime.now(UTC)
    await service.change(path, expires_at=datetime(2026, 1, 2, tzinfo=UTC))
    assert await statuses(everywhere, mine) == {(404, "expired at 2026-01-02 00:00:00 UTC")}
    record = await service.store.get_checkpoint(path)
    await service.store.delete_checkpoint(path)  # its files follow later
    assert await statuses(everywhere, mine) == {(404, "was deleted")}
    await service.store.add_checkpoint(replace(record, expires_at=None, created_at=now))
    assert await statuses(everywhere, mine) == {(404, "was replaced by a later one of the same name")}
    assert await statuses(everywhere, await links(bob[1], path)) == {(200, "")}


async def test_links_and_tokens_end_with_their_key(service: Service) -> None:
    bob = service.clients["bob"]
    path = await a_published_adapter(service)
    token = ok(await bob[0].http.post("auth/token", json={}))["jwt"]
    by_token = Client(bob[0].app, token)
    made = [*await links(bob[0], path), *await links(by_token, path)]
    assert await statuses(bob, made) == {(200, "")}
    async with server(service.data_dir, ("ann",)) as without_bob:
        other = without_bob["ann"]
        for link in made:
            answer = await other.http.get(link, headers={"X-API-Key": ""})
            assert answer.status_code == 401
            assert "this download link is no longer valid: the API key has been removed or has expired" in answer.text
        refused = await other.http.get("sessions", headers={"X-API-Key": token})
        assert refused.status_code == 401
    await by_token.http.aclose()


async def test_a_key_that_may_no_longer_read_a_checkpoint_takes_its_links_and_samplers_along(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator's key that is one no more."""
    ann, root = service.clients["ann"], service.clients["root"]
    async with service.engine():
        shared = await a_published_sampler(ann[0])
    sampler = await root[0].sampler(shared)
    path = await a_published_adapter(service)
    made = await links(root[0], path)
    for each in (shared, path):
        await ann[0].http.delete(f"{of(each)}/publish")
    assert await statuses(root, made) == {(200, "")}
    demoted = root[1].app.state.context.api_keys
    keys = tuple(key.model_copy(update={"admin": False}) for key in demoted.keys.now())
    monkeypatch.setattr(demoted, "keys", LiveKeys(KeySource(keys=keys)))
    why = "is not published, and the API key of the link may no longer read it"
    assert await statuses([root[1]], made) == {(404, why)}
    assert_closed(await root[1].asample(sampler, 0), shared, "is not published, and your key may no longer read it")
