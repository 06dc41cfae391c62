"""Whatever stays open is limited when it is opened: streams, long polls, uploads, downloads.

The places are found in the sources: answers that are sent piece by piece, bodies that are read piece by piece, and
waiting for what happens. A new one needs a limit, and a line here that names the test of it.
"""

import ast
import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import httpx
import syntax_trees

from tinsmith.checkpoints import uploads
from tinsmith.operations import LoraConfig
from tinsmith.plugins.loading import Plugins
from tinsmith.server.app import create_app
from tinsmith.server.signed_urls import Grant
from tinsmith.settings import ApiKey, QuotaSettings, ServerSettings, Settings
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.engine_driver import WAIT_S

ROOT = Path(__file__).parents[2]
ROOMS = (
    ROOT / "core/tinsmith/server",
    ROOT / "core/tinsmith/builtin",
    ROOT / "core/tinsmith/features",
    *sorted(ROOT.glob("plugins/*/tinsmith_*/")),
)
_ANSWERS: Final = frozenset({"StreamingResponse", "FileResponse", "EventSourceResponse"})
_WAITS: Final = frozenset({"unless_stopped", "unless_gone", "WebSocketRoute", "websocket", "add_websocket_route"})

POLLS = "tests/unit/test_admission.py::test_long_polls_of_a_tenant_are_limited"
ALL = "tests/unit/test_admission.py::test_all_requests_of_a_tenant_are_limited"
DOWNLOADS = "tests/unit/test_revocation.py::test_a_download_is_a_request_in_progress_of_whoever_made_its_link"
STREAMS = "tests/unit/test_run_streams.py::test_streams_of_links_are_limited_when_they_are_opened"

LIMITED_BY: Mapping[str, str] = {
    "server.routes.metrics:run_events": STREAMS,
    "server.run_streams:RunStreams._read": "tests/unit/test_run_streams.py::test_all_streams_of_a_run_share_one_reader",
    "server.routes.futures:_wait": POLLS,
    "server.routes.futures:retrieve_futures": POLLS,
    "server.routes.downloads:get_file": DOWNLOADS,
    "server.routes.downloads:_sent": DOWNLOADS,
    "server.routes.uploads:put_file": (
        "tests/unit/test_what_stays_open.py::test_an_upload_is_a_request_in_progress_of_whoever_began_it"
    ),
    "server.route_sampling:TenantSampling._finished": ALL,
    "tinsmith_openai.live_answers:LiveAnswer.response": ALL,
    "tinsmith_openai.live_answers:_ClosingResponse": ALL,
    "tinsmith_openai.messages.routes:_Drawn.answered": ALL,
    "tinsmith_openai.messages.routes:messages_router.messages": ALL,
    "tinsmith_openai.messages.routes:messages_router.count_tokens": ALL,
    "tinsmith_openai.routes:Endpoints._answered": ALL,
    "tinsmith_openai.routes:Endpoints._written": ALL,
}
"""By module and function: the test of the limit."""

SMALL = "files of some kilobytes, which the socket's buffers take whole; strangers' requests have one bucket"
NEVER_LONG = {
    "server.descriptions:add_descriptions.send": SMALL,
    "builtin.page:tinsmith_register_routes.file": SMALL,
    "tinsmith_openai.chat_page:chat_router.page": SMALL,
    "tinsmith_openai.chat_page:chat_router.file": SMALL,
}


def test_whatever_stays_open_has_a_limit() -> None:
    found = {place for room in ROOMS for file in room.rglob("*.py") for place in places(file, room)}
    assert found - LIMITED_BY.keys() - NEVER_LONG.keys() == set(), "limit them when they open, and name the test above"
    assert (LIMITED_BY.keys() | NEVER_LONG.keys()) - found == set(), "they no longer stay open"
    assert sorted({test for test in LIMITED_BY.values() if not syntax_trees.has_test(ROOT, test)}) == []


def places(file: Path, room: Path) -> set[str]:
    """Return the functions of a file in which something stays open, as "module:function"."""
    module = ".".join(file.relative_to(room.parent).with_suffix("").parts)
    return {f"{module}:{name}" for name, node in syntax_trees.named(syntax_trees.tree_of(file)) if stays_open(node)}


def stays_open(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in _ANSWERS | _WAITS
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _ANSWERS | _WAITS
        case ast.ClassDef(bases=bases):
            return any(isinstance(base, ast.Name) and base.id in _ANSWERS for base in bases)
        case ast.AsyncFor(iter=ast.Call(func=ast.Attribute(attr="stream"))):
            return True
    return False


async def test_an_upload_is_a_request_in_progress_of_whoever_began_it(tmp_path: Path) -> None:
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path, api_keys=(ApiKey.model_validate({"key": "tml-a", "tenant": "ann"}),)),
        quotas=QuotaSettings(requests_in_progress=1),
    )
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=tmp_path))
    await store.open()
    app, now = await create_app(settings, store=store, plugins=Plugins()), datetime.now(UTC)
    announced = uploads.Announced(
        tenant="ann",
        base_model="toy",
        lora=LoraConfig(rank=2, seed=0, train_attn=True, train_mlp=True, train_unembed=True),
        project_id=None,
        created_at=now,
        expires_at=now + timedelta(hours=1),
        max_bytes=1 << 20,
    )
    upload_id = uploads.begin(settings.data_dir.uploads, announced)
    grant = Grant(created_at=now, only_while_public=False, key_id="")
    first, second = (
        app.state.context.signer.url_path(uploads.link_name("ann", upload_id, file), announced.expires_at, grant)
        for file in uploads.FILES
    )
    begun, rest = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        begun.set()
        await rest.wait()
        yield b"b"

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test/api/v1/uploads/", timeout=WAIT_S) as http:
        uploading = asyncio.create_task(http.put(first, content=slow()))
        await begun.wait()
        refused = await http.put(second, content=b"b")
        assert (refused.status_code, "(quotas.requests_in_progress)" in refused.text) == (429, True), refused.text
        rest.set()
        assert (await uploading).status_code == 204
        assert (await http.put(second, content=b"b")).status_code == 204
    await store.close()
