"""Every credential is in one table, with what it is made from; and it ends with that, on every server of the store.

The places that make secrets and signatures are found in the sources. A new one needs a row in the table of
`docs/explanation/rights-and-versions.md`, or a line here that says why it opens nothing.
"""

import ast
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import pytest_asyncio
import syntax_trees
from fastapi import FastAPI
from starlette.responses import Response

import tinsmith.server.issued_keys
import tinsmith_oidc.sessions
from tinsmith.checkpoints import uploads
from tinsmith.hook_values import Principal
from tinsmith.operations import LoraConfig
from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.server.live_keys import LiveKeys
from tinsmith.server.signed_urls import Grant
from tinsmith.settings import ApiKey, KeySource, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.engine_driver import WAIT_S
from tinsmith.testing.harness import TOY
from tinsmith_oidc.cookies import Cookies

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/rights-and-versions.md"
ROOMS = (
    ROOT / "core/tinsmith",
    *sorted(ROOT.glob("libraries/*/tinsmith_*/")),
    *sorted(ROOT.glob("plugins/*/tinsmith_*/")),
)
NOT_SERVED: Final = "tinsmith/testing/"
MAKES: Final = re.compile(r"secrets\.|hmac\.|jwt\.encode|urandom|uuid")

NAMES: Final = "a name: whoever knows it still needs a credential of its tenant"
SHOWN: Final = "an id in answers and logs, which nothing asks for"
OPENS_NOTHING: Final = {
    "tinsmith.checkpoints.tinker_path:TinkerPath.new_directory": NAMES,
    "tinsmith.checkpoints.uploads:begin": NAMES,
    "tinsmith.checkpoints.uploads:_write": NAMES,
    "tinsmith.engine.recovery_points:RecoveryPoints.__init__": NAMES,
    "tinsmith.engine.snapshots:Snapshots.__init__": NAMES,
    "tinsmith.processes.engine_child:new_engine_id": NAMES,
    "tinsmith.references:log_privately": SHOWN,
    "tinsmith.server.context:ServerContext": NAMES,
    "tinsmith.server.error_answers:_unexpected": SHOWN,
    "tinsmith.server.held_checkpoints:ended_session": NAMES,
    "tinsmith.server.routes.sampling:join_sampling_session": NAMES,
    "tinsmith.server.routes.sessions:open_session": NAMES,
    "tinsmith.sql_store.databases.notify_wakeups:NotifyWakeUps.__init__": NAMES,
    "tinsmith.sql_store.databases.socket_wakeups:SocketWakeUps.open": NAMES,
    "tinsmith.sql_store.subjects.upkeep:check_writing": "bytes that are written to see whether the disk takes them",
    "tinsmith.store.request_ids:new_request_id": NAMES,
    "tinsmith_openai.answers:head": SHOWN,
    "tinsmith_openai.drawing:sampling_params": "seeds",
    "tinsmith_openai.messages.answers:message_start": SHOWN,
    "tinsmith_openai.reading:reading_of": "the seed of ids in answers",
    "tinsmith_openai.special_tokens:SpecialTokens.__init__": "marks in prompts, which no client sees",
    "tinsmith_workers.state_files:StateFiles.__init__": NAMES,
}


def rows() -> list[list[str]]:
    """Return the cells of the table."""
    table = PAGE.read_text(encoding="utf-8").partition("## Every credential")[2].partition("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if "|" in line]
    return found[2:]


async def test_every_place_that_makes_a_secret_or_a_signature_is_in_the_table() -> None:
    listed = {place for row in rows() for place in re.findall(r"`(tinsmith[\w.]*:[\w.]+)`", row[2])}
    found = {place for room in ROOMS for file in room.rglob("*.py") for place in places(file, room)}
    assert found - listed - OPENS_NOTHING.keys() == set(), "add a row to the table, and what ends it to the walk below"
    assert (listed | OPENS_NOTHING.keys()) - found == set(), "they make nothing any more"


async def test_every_row_has_a_test_that_ends_it() -> None:
    for row in rows():
        tests = re.findall(r"`([\w/]+\.py::\w+)`", row[5])
        assert tests, row[0]
        assert [each for each in tests if not syntax_trees.has_test(ROOT, each)] == [], row[0]
    walked = {row[0] for row in rows() if "::test_a_credential_ends_with_what_it_was_made_from" in row[5]}
    assert walked == {row for row, *_ in WALK}, "the table says which rows the walk below has"


def places(file: Path, room: Path) -> Iterator[str]:
    if NOT_SERVED in file.as_posix() or MAKES.search(file.read_text(encoding="utf-8")) is None:
        return
    module = ".".join(file.relative_to(room.parent).with_suffix("").parts)
    for name, node in syntax_trees.named(syntax_trees.tree_of(file)):
        if makes_a_secret(node):
            yield f"{module}:{name}"


def makes_a_secret(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="secrets"), attr=name):
            return name.startswith(("token", "rand", "choice"))
        case ast.Attribute(value=ast.Name(id="hmac"), attr="new" | "digest" | "HMAC"):
            return True
        case ast.Attribute(value=ast.Name(id="jwt"), attr="encode"):
            return True
        case ast.Attribute(value=ast.Name(id="os"), attr="urandom") | ast.Attribute(value=ast.Name(id="uuid")):
            return True
    return False


# The walk -------------------------------------------------------------------------------------------------------------

ISSUER, ACCOUNT = "https://id.example", "0" * 32
KEYS = tuple(
    ApiKey.model_validate({"key": f"tml-{each}", "tenant": each, "admin": each == "root"}) for each in ("ann", "root")
)
OWN_PAGE: Final = {"sec-fetch-site": "same-origin"}
Headers = dict[str, str]


@dataclass
class World:
    """Two servers of one store, with a login."""

    apps: list[FastAPI]
    servers: list[httpx.AsyncClient]
    cookies: Cookies
    run: str = ""
    session: str = ""
    account: str = ""

    def signed_in(self) -> Headers:
        """Return the headers of a browser in which Ann has just signed in."""
        answer = Response()
        self.cookies.open(answer, Principal(tenant="ann", name="ann"), self.account)
        return {"cookie": answer.headers["set-cookie"].partition(";")[0], **OWN_PAGE}

    async def ok(self, method: str, path: str, headers: Headers, body: object = None) -> Any:
        answer = await self.servers[0].request(method, path, headers=headers, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def key(self, headers: Headers, **body: object) -> Headers:
        made = await self.ok("POST", "/api/v1/auth/apikeys", headers, {"name": "laptop", **body})
        return {"x-api-key": made["key"]}

    def configure(self, keys: tuple[ApiKey, ...]) -> None:
        for app in self.apps:
            app.state.context.api_keys.keys = LiveKeys(KeySource(keys=keys))


Use = Callable[[httpx.AsyncClient], Awaitable[int]]
"""Uses a credential at a server, and returns the status."""
Make = Callable[[World, Headers], Awaitable[Use]]
Parent = Callable[[World], Awaitable[Headers]]
End = Callable[[World, Headers], Awaitable[object]]


def by_headers(headers: Headers, path: str = "/api/v1/sessions") -> Use:
    async def use(server: httpx.AsyncClient) -> int:
        return (await server.get(path, headers=headers)).status_code

    return use


# what is made


async def itself(_world: World, parent: Headers) -> Use:
    return by_headers(parent)


async def a_key(world: World, parent: Headers) -> Use:
    return by_headers(await world.key(parent))


async def a_lasting_key(world: World, parent: Headers) -> Use:
    return by_headers(await world.key(parent, expires_in_s=7 * 86400))


async def a_token(world: World, parent: Headers) -> Use:
    return by_headers({"x-api-key": (await world.ok("POST", "/api/v1/auth/token", parent, {}))["jwt"]})


async def a_token_of_a_key(world: World, parent: Headers) -> Use:
    return await a_token(world, await world.key(parent))


async def a_download(world: World, parent: Headers) -> Use:
    found = await world.ok("GET", f"/api/v1/sessions/{world.session}/trace_export", parent)
    return by_headers({}, urlsplit(found["url"]).path)


async def an_upload(world: World, parent: Headers) -> Use:
    """As `external_weights_upload_start` does, for a model that has no directory to compare an adapter with."""
    context = world.apps[0].state.context
    now = context.now()
    announced = uploads.Announced(
        tenant="ann",
        base_model="toy",
        lora=LoraConfig(rank=2, seed=0, train_attn=True, train_mlp=True, train_unembed=True),
        project_id=None,
        created_at=now,
        expires_at=now + timedelta(hours=1),
        max_bytes=100,
    )
    upload_id = uploads.begin(context.settings.data_dir.uploads, announced)
    name = uploads.link_name("ann", upload_id, uploads.FILES[0])
    trace = await world.ok("GET", f"/api/v1/sessions/{world.session}/trace_export", parent)
    grant = Grant.parse(urlsplit(trace["url"]).path.split("/")[5])
    path = f"/api/v1/uploads/{context.signer.url_path(name, announced.expires_at, grant)}"

    async def use(server: httpx.AsyncClient) -> int:
        return (await server.put(path, content=b"a")).status_code

    return use


async def a_share_link(world: World, parent: Headers) -> Use:
    made = await world.ok("POST", f"/api/v1/runs/{world.run}/share_links", parent, {})
    secret = parse_qs(urlsplit(made["url"]).fragment)["share"][0]
    return by_headers({"x-share-secret": secret}, f"/api/v1/runs/{world.run}/metrics")


# from what


async def configured(_world: World) -> Headers:
    return {"x-api-key": "tml-ann"}


async def session(world: World) -> Headers:
    return world.signed_in()


async def made_key(world: World) -> Headers:
    return await world.key({"x-api-key": "tml-ann"})


async def key_of_a_session(world: World) -> Headers:
    return await world.key(world.signed_in())


# and how that ends


async def removed(world: World, _parent: Headers) -> None:
    world.configure(KEYS[1:])


async def deleted(world: World, parent: Headers) -> None:
    await world.ok("DELETE", "/api/v1/auth/apikey/me", parent)


async def signed_out(world: World, parent: Headers) -> None:
    await world.ok("POST", "/login/logout", parent)


async def signed_out_everywhere(world: World, _parent: Headers) -> None:
    await world.ok("POST", "/login/logout?everywhere=true", world.signed_in())


async def ended_by_an_administrator(world: World, _parent: Headers) -> None:
    await world.ok("POST", f"/login/end?account={world.account}", {"x-api-key": "tml-root"})


async def revoked(world: World, parent: Headers) -> None:
    path = f"/api/v1/runs/{world.run}/share_links"
    for link in (await world.ok("GET", path, parent))["links"]:
        await world.ok("DELETE", f"{path}/{link['share_id']}", parent)


WALK: Final[list[tuple[str, Make, Parent, End]]] = [
    ("API key of the configuration", itself, configured, removed),
    ("API key made with a configured key", a_key, configured, removed),
    ("API key made with a configured key", itself, made_key, deleted),
    ("API key made while signed in", a_key, session, signed_out),
    ("API key made while signed in", a_key, session, signed_out_everywhere),
    ("API key made while signed in", a_key, session, ended_by_an_administrator),
    ("API key made while signed in, with an end of its own", a_lasting_key, session, signed_out_everywhere),
    ("API key made while signed in, with an end of its own", a_lasting_key, session, ended_by_an_administrator),
    ("token for an API key", a_token, configured, removed),
    ("token for an API key", a_token, made_key, deleted),
    ("token for an API key", a_token_of_a_key, session, signed_out),
    ("link to a file, an archive or a trace", a_download, configured, removed),
    ("link to a file, an archive or a trace", a_download, made_key, deleted),
    ("link to a file, an archive or a trace", a_download, session, signed_out),
    ("link to a file, an archive or a trace", a_download, session, ended_by_an_administrator),
    ("link to a file, an archive or a trace", a_download, key_of_a_session, deleted),
    ("link for an upload", an_upload, configured, removed),
    ("link for an upload", an_upload, session, signed_out),
    ("share link", a_share_link, configured, revoked),
    ("session of a browser", itself, session, signed_out),
    ("session of a browser", itself, session, signed_out_everywhere),
    ("session of a browser", itself, session, ended_by_an_administrator),
]
"""The row of the table, how a credential is made, from what, and how that ends."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("data")
    login = {"plugin": "oidc", "issuer": ISSUER, "client_id": "a"}
    server = {"data_dir": directory, "api_keys": KEYS}
    settings = Settings.model_validate({"server": server, "login": login, "models": [TOY]})
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module in (tinsmith.server.issued_keys, tinsmith_oidc.sessions):
            patch.setattr(module, "KEPT_S", 0.0)  # as if a second had passed
        apps, servers = [], []
        for _ in range(2):
            context = StoreContext(data_dir=directory, tables=Plugins.load().make_tables())
            store = SqlStore(SqlStoreConfig(synchronous="off"), context)
            await store.open()
            stack.push_async_callback(store.close)
            apps.append(await create_app(settings, store=store, plugins=Plugins.load()))
            transport = httpx.ASGITransport(app=apps[-1])
            http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=WAIT_S)
            servers.append(await stack.enter_async_context(http))
        secret = await store.secret("plugins")
        world = World(apps, servers, Cookies(secret, purpose=f"{ISSUER} a", session_s=3600, secure=False))
        ann = {"x-api-key": "tml-ann"}
        world.session = (await world.ok("POST", "/api/v1/create_session", ann, {}))["session_id"]
        body = {"session_id": world.session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}
        world.run = (await world.ok("POST", "/api/v1/create_model", ann, body))["model_id"]
        yield world


@pytest.fixture
def world(servers: World) -> World:
    """Another account for each test."""
    servers.account = secrets.token_hex(16)
    servers.configure(KEYS)
    return servers


@pytest.mark.parametrize(
    ("row", "make", "parent", "end"), WALK, ids=lambda each: getattr(each, "__name__", None) or each.replace(" ", "-")
)
async def test_a_credential_ends_with_what_it_was_made_from(
    world: World, row: str, make: Make, parent: Parent, end: End
) -> None:
    del row
    made_from = await parent(world)
    use = await make(world, made_from)
    assert [await use(server) for server in world.servers] in ([200, 200], [204, 204])
    await end(world, made_from)
    assert [await use(server) for server in world.servers] in ([401, 401], [404, 404])


async def test_a_key_with_an_end_of_its_own_outlives_the_session_and_no_more(world: World) -> None:
    """It is named, listed with its account, and expires."""
    ann = world.signed_in()
    key = await world.key(ann, expires_in_s=60)
    await signed_out(world, ann)
    assert [await by_headers(key)(server) for server in world.servers] == [200, 200]
    listed = (await world.ok("GET", "/api/v1/auth/apikeys", key))["api_keys"][0]
    assert (listed["name"], listed["account"], "expires_at" in listed) == ("laptop", world.account, True)
    refused = await world.servers[0].post(
        "/api/v1/auth/apikeys", headers=world.signed_in(), json={"name": "a", "expires_in_s": 31 * 86400}
    )
    assert (refused.status_code, "server.made_key_lifetime_s" in refused.text) == (400, True)
    ended = await world.servers[1].post(f"/login/end?account={world.account}", headers=key)
    assert ended.status_code == 403, "a key ends no account"


async def test_whoever_signs_in_again_begins_anew(world: World) -> None:
    before = await world.key(world.signed_in(), expires_in_s=60)
    await ended_by_an_administrator(world, {})
    after = await world.key(world.signed_in(), expires_in_s=60)
    for server in world.servers:
        assert [await by_headers(key)(server) for key in (before, after)] == [401, 200]


async def test_a_key_made_in_a_session_expires_with_it(world: World) -> None:
    made = await world.ok("POST", "/api/v1/auth/apikeys", world.signed_in(), {"name": "laptop"})
    assert made["expires_at"] is not None
    assert await world.servers[0].get("/api/v1/sessions", headers={"x-api-key": made["key"]})
