"""Keys follow the configuration file: a change counts at the next request, and a mistake never opens the server."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tinsmith.commands import cli
from tinsmith.commands.load_settings import load_api_keys
from tinsmith.errors import AuthenticationError, ConfigError
from tinsmith.plugins.loading import Plugins
from tinsmith.server import live_keys
from tinsmith.server.app import create_app
from tinsmith.server.limits import bodies
from tinsmith.server.live_keys import LiveKeys
from tinsmith.settings import KeySource, ServerSettings, Settings
from tinsmith.settings.schema import digest_of_key
from tinsmith.settings.sources import Flag
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.harness import TOY

ANN, BOB = "{key: tml-ann, tenant: ann}", "{key: tml-bob, tenant: bob}"


def write(file: Path, *keys: str) -> None:
    file.write_text(f"server: {{api_keys: [{', '.join(keys)}]}}\n", encoding="utf-8")
    file.chmod(0o600)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "tinsmith.yaml"
    write(file, ANN, BOB)
    return file


def live(file: Path, flags: tuple[Flag, ...] = (), environ: dict[str, str] | None = None) -> LiveKeys:
    read = partial(load_api_keys, file=file, environ=environ or {}, flags=flags)
    return LiveKeys(read(), read=read)


def tenants(keys: LiveKeys) -> list[str]:
    return [key.tenant for key in keys.now()]


def test_keys_follow_the_file(file: Path) -> None:
    keys = live(file)
    assert tenants(keys) == ["ann", "bob"]
    write(file, ANN)
    assert tenants(keys) == ["ann"]
    write(file, BOB, ANN.replace("}", ", admin: true}"))
    assert [(key.tenant, key.admin) for key in keys.now()] == [("bob", False), ("ann", True)]


def test_a_change_between_start_and_first_request_is_seen(file: Path) -> None:
    keys = live(file)
    write(file, BOB)
    assert tenants(keys) == ["bob"]


def test_a_change_within_one_tick_of_the_file_systems_clock_is_seen(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(live_keys, "stamp_of", lambda _file: (1,))
    read = partial(load_api_keys, file=file, environ={}, flags=())
    keys = LiveKeys(KeySource(keys=(), files=(file,)), read=read, clock=lambda: now_s)
    assert tenants(keys) == ["ann", "bob"]
    write(file, BOB)
    assert tenants(keys) == ["bob"]
    write(file, ANN)
    now_s = 100.0  # the next request comes late
    assert tenants(keys) == ["ann"]
    write(file, BOB)
    assert tenants(keys) == ["ann"]  # changes so late have another time stamp


def test_a_file_that_is_replaced_is_followed(file: Path) -> None:
    """As by editors, and by links that configuration management swaps."""
    link = file.with_name("link.yaml")
    link.symlink_to(file)
    keys = live(link)
    assert tenants(keys) == ["ann", "bob"]
    other = file.with_name("other.yaml")
    write(other, BOB)
    other.replace(file)
    assert tenants(keys) == ["bob"]
    write(other, ANN)
    link.unlink()
    link.symlink_to(other)
    assert tenants(keys) == ["ann"]


def test_an_unchanged_file_is_not_read_again(file: Path) -> None:
    now_s, reads = [0.0], []
    read = partial(load_api_keys, file=file, environ={}, flags=())
    keys = LiveKeys(read(), read=lambda: reads.append(1) or read(), clock=lambda: now_s[0])  # type: ignore[func-returns-value]
    for now_s[0] in (0.0, 1.0, 100.0):
        assert tenants(keys) == ["ann", "bob"]
    assert reads == [1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("server: {api_keys: [", "not valid YAML", id="half a file"),
        pytest.param("server: {api_keys: [{key: tml-bob}]}", "server.api_keys.0.tenant", id="no tenant"),
        pytest.param("server: {api_keys: [{key: bob, tenant: bob}]}", "do not start with 'tml-'", id="wrong prefix"),
        pytest.param("server: {api_key: []}", "unknown key, allowed: api_keys, ", id="misspelt"),
        pytest.param("server: {port: x, api_keys: []}", "server.port", id="another setting"),
        pytest.param(None, "cannot read the configuration file", id="deleted"),
    ],
)
def test_a_broken_edit_changes_nothing_and_is_logged_once(
    file: Path, text: str | None, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = live(file)
    assert tenants(keys) == ["ann", "bob"]
    file.unlink() if text is None else file.write_text(text, encoding="utf-8")
    for _ in range(3):
        assert tenants(keys) == ["ann", "bob"]
    ours = [each for each in caplog.records if each.name.startswith("tinsmith.")]  # SDK clients of others warn, too
    (record,) = ours
    assert record.levelno == logging.ERROR
    assert "the API keys stay as they are" in record.message
    assert problem in record.message
    assert "tml-bob" not in caplog.text
    write(file, BOB)
    assert tenants(keys) == ["bob"]


def test_what_changed_is_logged_without_keys(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = live(file)
    write(file, BOB, "{key: tml-eve, tenant: eve}", "{key: tml-joe, tenant: joe}")
    keys.now()
    assert caplog.messages == ["the API keys have changed: 2 added, 1 removed, 3 now"]
    assert "tml-" not in caplog.text


def test_without_the_last_key_everybody_is_refused(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = live(file)
    for text in ("server: {api_keys: []}", "server: {}", ""):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(AuthenticationError, match="accepts no API key: all of them were removed"):
            keys.now()
    assert "every request is refused until keys are added" in caplog.text
    write(file, BOB)
    assert tenants(keys) == ["bob"]


def test_the_first_key_closes_a_server_without_keys(tmp_path: Path) -> None:
    file = tmp_path / "tinsmith.yaml"
    file.write_text("server: {port: 0}\n", encoding="utf-8")
    keys = live(file)
    assert tenants(keys) == []
    write(file, ANN)
    assert tenants(keys) == ["ann"]
    write(file)
    with pytest.raises(AuthenticationError):
        keys.now()


def test_keys_in_a_file_of_their_own_are_followed_too(file: Path) -> None:
    own = file.with_name("keys.yaml")
    file.write_text(f"server: {{api_keys: [{ANN}], api_keys_file: {own}}}\n", encoding="utf-8")
    own.write_text(f"- {BOB}\n", encoding="utf-8")
    keys = live(file)
    assert tenants(keys) == ["ann", "bob"]
    own.write_text("- {key: tml-eve, tenant: eve}\n", encoding="utf-8")
    assert tenants(keys) == ["ann", "eve"]
    own.write_text("", encoding="utf-8")
    assert tenants(keys) == ["ann"]
    other = file.with_name("other.yaml")
    other.write_text(f"- {BOB}\n", encoding="utf-8")
    file.write_text(f"server: {{api_keys_file: {other}}}\n", encoding="utf-8")
    assert tenants(keys) == ["bob"]
    other.write_text(f"- {ANN}\n", encoding="utf-8")
    assert tenants(keys) == ["ann"]
    other.unlink()
    assert tenants(keys) == ["ann"]


def test_a_key_that_comes_twice_changes_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = live(file)
    hashed = f"{{key: 'sha256:{digest_of_key('tml-ann')}', tenant: ann}}"
    for again in ("{key: tml-ann, tenant: eve}", hashed):
        write(file, ANN, again)
        assert tenants(keys) == ["ann", "bob"]
        assert "server.api_keys.1.key: is the key of server.api_keys.0 again" in caplog.messages[-1]
    assert "tml-ann" not in caplog.text
    with pytest.raises(ConfigError, match=r"server\.api_keys\.1 has the same key as server\.api_keys\.0"):
        LiveKeys(KeySource(keys=(*keys.now()[:1], *keys.now()[:1])))


def test_a_file_of_keys_that_everybody_can_read_is_logged(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = file.with_name("keys.yaml")
    file.write_text(f"server: {{api_keys_file: {own}}}\n", encoding="utf-8")  # which holds none itself
    file.chmod(0o644)
    for mode, key, warns in (
        (0o644, "tml-ann", True),
        (0o640, "tml-ann", False),
        (0o644, f"'sha256:{digest_of_key('tml-ann')}'", False),
    ):
        own.write_text(f"- {{key: {key}, tenant: ann}}\n", encoding="utf-8")
        own.chmod(mode)
        live(file).warn_of_readers()
        assert len(caplog.messages) == warns
        assert all(f"can read the API keys in {own};" in each for each in caplog.messages)
        caplog.clear()


def test_keys_given_elsewhere_go_before_those_of_the_file(file: Path) -> None:
    by_flag = live(file, flags=(Flag("server.api_keys", f"[{ANN}]"),))
    by_variable = live(file, environ={"TINSMITH_SERVER__API_KEYS": f"[{ANN}]"})
    write(file, BOB)
    assert tenants(by_flag) == tenants(by_variable) == ["ann"]


@pytest.mark.parametrize("by_variable", [False, True])
def test_the_command_line_serves_with_the_keys_of_its_file(
    file: Path, by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[LiveKeys] = []
    monkeypatch.setattr("tinsmith.processes.serve.serve", lambda _settings, _plugins, keys: served.append(keys))
    if by_variable:
        monkeypatch.setenv("TINSMITH_CONFIG", str(file))
    config = () if by_variable else ("--config", str(file))
    monkeypatch.setattr("sys.argv", ["tinsmith", "serve", "--base-model", "any", "--backend", "toy", *config])
    with pytest.raises(SystemExit, match="0"):
        cli.app()
    (keys,) = served
    assert tenants(keys) == ["ann", "bob"]
    write(file, BOB)
    assert tenants(keys) == ["bob"]


# Servers --------------------------------------------------------------------------------------------------------------


@dataclass
class Servers:
    """Two servers of one store and one file."""

    file: Path
    https: tuple[httpx.AsyncClient, httpx.AsyncClient]

    async def statuses(self, path: str, credential: str) -> list[int]:
        return [(await http.get(path, headers={"X-API-Key": credential})).status_code for http in self.https]


@asynccontextmanager
async def a_server(file: Path) -> AsyncIterator[httpx.AsyncClient]:
    keys = live(file)
    settings = Settings(server=ServerSettings(data_dir=file.parent, api_keys=keys.now()), models=(TOY,))
    store = SqlStore(SqlStoreConfig(synchronous="off"), StoreContext(data_dir=file.parent))
    await store.open()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        app = await create_app(settings, store=store, plugins=Plugins.load(), keys=keys)
        transport = httpx.ASGITransport(app=app)
        yield await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://test/api/v1/"))


@pytest_asyncio.fixture
async def servers(file: Path) -> AsyncIterator[Servers]:
    async with a_server(file) as one, a_server(file) as two:
        yield Servers(file, (one, two))


async def test_a_removed_key_ends_with_its_tokens_on_every_server(servers: Servers) -> None:
    answer = await servers.https[0].post("auth/token", json={}, headers={"X-API-Key": "tml-bob"})
    token = answer.json()["jwt"]
    assert await servers.statuses("sessions", "tml-bob") == await servers.statuses("sessions", token) == [200, 200]
    write(servers.file, ANN)
    assert await servers.statuses("sessions", "tml-bob") == await servers.statuses("sessions", token) == [401, 401]
    assert await servers.statuses("sessions", "tml-ann") == [200, 200]
    write(servers.file, ANN, BOB)
    assert await servers.statuses("sessions", "tml-bob") == [200, 200]


async def test_a_key_that_is_removed_while_a_body_arrives_is_refused(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "STALE_S", -1.0)  # however fast this machine is

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        write(servers.file, ANN)
        yield b"}"

    headers = {"X-API-Key": "tml-bob", "content-type": "application/json"}
    answer = await servers.https[0].post("create_session", content=body(), headers=headers)
    assert answer.status_code == 401


async def test_what_a_key_may_read_changes_too(servers: Servers) -> None:
    made = await servers.https[0].post("create_session", json={}, headers={"X-API-Key": "tml-ann"})
    path = f"sessions/{made.json()['session_id']}"
    assert await servers.statuses(path, "tml-bob") == [404, 404]
    write(servers.file, ANN, BOB.replace("}", ", admin: true}"))
    assert await servers.statuses(path, "tml-bob") == [200, 200]


async def test_no_key_opens_a_server_whose_keys_are_gone(servers: Servers) -> None:
    token = (await servers.https[0].post("auth/token", json={}, headers={"X-API-Key": "tml-bob"})).json()["jwt"]
    write(servers.file)
    for credential in ("tml-ann", "tml-stranger", token):
        assert await servers.statuses("sessions", credential) == [401, 401]
    assert await servers.statuses("healthz", "") == [200, 200]
