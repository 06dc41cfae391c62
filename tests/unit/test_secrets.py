"""No secret is printed, logged or reported, and no process gets one that it does not need."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import Field, ValidationError

import tinsmith
from tinsmith.commands import cli
from tinsmith.commands.load_settings import load_settings
from tinsmith.errors import ConfigError
from tinsmith.lifeline import Tethered
from tinsmith.plugins.loading import Plugins
from tinsmith.processes import engine_child
from tinsmith.processes.engine_child import EngineChild, engine_environment
from tinsmith.processes.serve import forget_settings_of_environment
from tinsmith.settings import ApiKey, PluginSection, Settings, secrets
from tinsmith.settings.environment import WORKER_KEY as WORKER_KEY_VARIABLE
from tinsmith.settings.environment import remember_credentials
from tinsmith.settings.secrets import CleanFormatter, cleaned, is_secret_name
from tinsmith.settings.sources import Flag
from tinsmith.sql_store.choose import dialect_of
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.store import StoreContext
from tinsmith_workers import command, launching
from tinsmith_workers.config import WorkersConfig

KEY, TOKEN, PASSWORD, WORKER_KEY = "tml-hunter2", "hf_swordfish", "op%2Fensesame", "abracadabra"
SECRETS = (KEY, TOKEN, PASSWORD, "op/ensesame", WORKER_KEY)
URL = f"postgresql://ann:{PASSWORD}@127.0.0.1:9/none?connect_timeout=1"


class GaugeConfig(tinsmith.BackendConfig):
    engine_args: dict[str, Any] = Field({})
    steps: int = 1


class Gauge:
    """A backend to which somebody passes a token, and which repeats it in what it raises."""

    @tinsmith.hookimpl
    def tinsmith_register_backends(self) -> list[tinsmith.BackendSpec[GaugeConfig]]:
        def create(config: GaugeConfig, context: tinsmith.BackendContext) -> tinsmith.TrainingBackend:
            raise RuntimeError(f"{context.model_name}: {config.engine_args} is refused")

        return [tinsmith.BackendSpec(name="gauge", config=GaugeConfig, create=create, needs_model_path=False)]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    loaded = Plugins.load([Gauge()])
    monkeypatch.setattr(cli.Plugins, "load", lambda: loaded)
    return loaded


def assert_clean(text: str) -> None:
    assert not [secret for secret in SECRETS if secret in text], text


# Mistakes -------------------------------------------------------------------------------------------------------------

SLIPS = (
    f'[{{"key": "{KEY}", "tenant": "ann"',
    f"[{{key: {KEY}, tenant: ann}}, {{key: '{KEY}]",
    f"[{{key: *{KEY}, tenant: ann}}]",
    f"[{{key: !{KEY} x, tenant: ann}}]",
    f"[{{{KEY}: ann}}]",
    f"[{{kye: {KEY}, tenant: ann}}]",
    f"[{{key: ann, tenant: {KEY}}}]",
    f"[{{key: {{value: {KEY}}}, tenant: ann}}]",
    f"[{{key: {KEY}, tenant: [{KEY}], admin: {KEY}}}]",
    f"{{{KEY}: ann}}",
    f"[{KEY}]",
    KEY,
)


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.parametrize("source", ["variable", "flag", "file"])
def test_a_slip_in_the_api_keys_prints_none(plugins: Plugins, tmp_path: Path, slip: str, source: str) -> None:
    file = tmp_path / "tinsmith.yaml"
    file.write_text(f"server:\n  api_keys: {slip}\n" if source == "file" else "")
    with pytest.raises(ConfigError) as caught:
        load_settings(
            plugins,
            file=file,
            environ={"TINSMITH_SERVER__API_KEYS": slip} if source == "variable" else {},
            flags=[Flag("server.api_keys", slip)] if source == "flag" else (),
        )
    assert_clean(str(caught.value))
    named = {"variable": "TINSMITH_SERVER__API_KEYS", "flag": "--server.api_keys", "file": f"{file}:"}
    assert named[source] in str(caught.value), "it says where the mistake is"


def test_the_place_of_a_secret_is_shown() -> None:
    assert [is_secret_name(name) for name in ("api_keys", "file_key", "token_path")] == [True, True, False]
    section = PluginSection.model_validate({"plugin": "gauge", "engine_args": {"password_file": "/run/file"}})
    assert "/run/file" in section.model_dump_json()


def test_settings_that_pydantic_refuses_are_not_repeated() -> None:
    for refuse in (
        lambda: ApiKey.model_validate({"key": KEY, "tenat": KEY}),
        lambda: Settings.model_validate({"server": {"api_keys": [KEY]}}),
        lambda: GaugeConfig.model_validate({"engine_args": KEY}),
    ):
        with pytest.raises(ValidationError) as caught:
            refuse()
        assert_clean(str(caught.value))


def test_an_unusable_database_url_is_not_repeated(tmp_path: Path) -> None:
    for url in (
        f"postgres:ann:{PASSWORD}@x",
        f"postgresql+pg8000://ann@x/y?password={PASSWORD}",
        f"oracle://a:{PASSWORD}@x",
    ):
        with pytest.raises(ConfigError) as caught:
            dialect_of(SqlStoreConfig.model_validate({"url": url}), StoreContext(data_dir=tmp_path))
        assert_clean(str(caught.value))


# Commands -------------------------------------------------------------------------------------------------------------

CONFIG = {
    "server": {"port": 0, "api_keys": [{"key": KEY, "tenant": "ann"}]},
    "store": {"plugin": "sql", "url": URL, "outage_s": 0.01},
    "models": [
        {
            "name": "tiny",
            "backend": {"plugin": "gauge", "engine_args": {"hf_token": TOKEN, "nested": {"token": [TOKEN]}}},
        }
    ],
}
COMMANDS = (
    ("check-config",),
    ("doctor",),
    ("doctor", "--json"),
    ("plan",),
    ("runs", "list"),
    ("runs", "show", "run"),
    ("replay", "run", "--until", "1", "--to", "there"),
    ("engine", "tiny"),
    ("serve",),
    ("plugins",),
    ("worker", "--coordinator", f"{TOKEN}:x"),
    ("worker", "--coordinator", "127.0.0.1:9", "--wait", "0"),
    ("simulate", "absent.yaml"),
    ("rehearse", "--model", "absent", "--cards", "1"),
    ("rehearsal-table", "absent", "--model", "absent"),
    ("megatron-plan", "--model", "absent", "--gpus", "8"),
    ("compile-check", "--topology", "v6e:1x1", "--model", "absent"),
    ("compile-table", "absent"),
    ("version",),
    ("new-plugin", "Not A Name", "--kind", "backend"),
    ("check-plugin", "Gauge", "--option", f"engine_args={{hf_token: {TOKEN}}}"),
    ("check-plugin", "Gauge", "--json", "--traceback", "--option", f"engine_args={{hf_token: {TOKEN}}}"),
    ("tiny-model", "made", "--num-layers", "1"),
    ("demo", "--directory", "tinsmith.yaml"),
    ("track", "absent", "--once", "--url", "http://127.0.0.1:9", "--key", KEY),
    ("status", "--url", "http://127.0.0.1:9", "--key", KEY),
    ("top", "--url", "http://127.0.0.1:9", "--key", KEY),
    ("session", "export-trace", "absent", "--url", "http://127.0.0.1:9", "--key", KEY),
    ("runs", "share", "absent"),
    ("conformance", "--url", "http://127.0.0.1:9", "--model", "tiny", "--key", KEY, "--list"),
    ("trackers", "tensorboard", "--dir", "out", "--url", "http://127.0.0.1:9", "--key", KEY, "--once"),
    ("checkpoint", "show", "tinker://run/weights/one"),
    ("checkpoint", "verify", "tinker://run/weights/one"),
    ("checkpoint", "convert", "tinker://run/weights/one", "out"),
    ("checkpoint", "export-peft", "tinker://run/weights/one", "out"),
    ("checkpoint", "merge", "tinker://run/weights/one", "out"),
    ("checkpoint", "import", "absent", "--base-model", "tiny", "--name", "one"),
    ("check-config", "--models.0.backend.steps", TOKEN, "--models.0.backend.engine_args.hf_token", TOKEN),
    ("check-config", "--models.0.backend.engine_arg", f'{{"hf_token": "{TOKEN}"}}'),
    ("check-config", "--store", f'{{"plugin": "sql", "urll": "{URL}"}}'),
    ("check-config", "--store.url", f"[{URL}"),
)


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every command of the tree that `--help` shows, by its words. Any: typer's own."""
    if not hasattr(command, "commands"):
        yield path
        return
    for name, inner in command.commands.items():
        yield from leaves(inner, (*path, name))


def test_every_command_is_among_those_that_print_no_secret(plugins: Plugins) -> None:
    found = set(leaves(typer.main.get_command(cli.build_group(plugins))))
    assert len(found) > 20
    assert {leaf for leaf in found if not any(command[: len(leaf)] == leaf for command in COMMANDS)} == set()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_prints_a_secret(
    plugins: Plugins,
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "tinsmith.yaml"
    config = {**CONFIG, "server": {**CONFIG["server"], "data_dir": str(tmp_path / "data")}}  # type: ignore[dict-item]
    file.write_text(json.dumps(config))
    for name, value in {"TINSMITH_CONFIG": str(file), "TINSMITH_WORKER_KEY": WORKER_KEY, "HF_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["tinsmith", *command])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k test_end_of_sequence")  # of the suites that check-plugin runs
    caplog.handler.setFormatter(CleanFormatter("%(message)s"))  # as the server's own
    with suppress(SystemExit):
        cli.app()
    out, err = capfd.readouterr()
    assert_clean(out + err + caplog.text)
    if command == ("check-config",):
        assert json.loads(out)["store"]["url"] == URL.replace(PASSWORD, secrets.MASK)


# What is printed while a server runs ----------------------------------------------------------------------------------


def test_a_log_line_and_its_traceback_are_clean() -> None:
    PluginSection.model_validate({"plugin": "gauge", "engine_args": {"hf_token": TOKEN}})
    error = RuntimeError(f"cannot fetch with {TOKEN}")
    record = logging.LogRecord("x", logging.ERROR, "", 1, "failed for %s", (TOKEN,), (type(error), error, None))
    text = CleanFormatter().format(record)
    assert_clean(text)
    assert "RuntimeError: cannot fetch with" in text


def test_secrets_are_masked_longest_first() -> None:
    for key in ("tml-one", "tml-one-more"):
        ApiKey.model_validate({"key": key, "tenant": "ann"})
    assert cleaned("tml-one-more and tml-one") == f"{secrets.MASK} and {secrets.MASK}"


@pytest.mark.parametrize("script", ["engine", "print"])
async def test_what_an_engine_prints_last_is_clean(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its backend repeats a token in the exception with which it fails, or a library prints one."""
    settings = Settings.model_validate({"server": {"data_dir": tmp_path}, "models": CONFIG["models"]})
    [model] = settings.models
    child = EngineChild(settings, model)
    code = _ENGINE if script == "engine" else f"import sys; sys.exit('RuntimeError: tiny: {TOKEN}')"
    monkeypatch.setattr(engine_child, "engine_command", lambda of: (sys.executable, "-c", code, str(of.settings_file)))
    ended = await child.run(None)
    printed = capfd.readouterr().err
    assert "RuntimeError: tiny: " in printed
    assert_clean(f"{printed} {ended}")


_ENGINE = """
import sys
sys.path.insert(0, DIRECTORY)
import test_secrets
from tinsmith.commands import cli
plugins = cli.Plugins.load([test_secrets.Gauge()])
cli.Plugins.load = lambda: plugins
sys.argv = ["tinsmith", "engine", "tiny", "--config", sys.argv[1]]
cli.app()
""".replace("DIRECTORY", repr(str(Path(__file__).parent)))


# Environments ---------------------------------------------------------------------------------------------------------

SETTINGS = {
    "TINSMITH_SERVER__API_KEYS": f'[{{"key": "{KEY}", "tenant": "ann"}}]',
    "TINSMITH_STORE__URL": URL,
    "TINSMITH_MODELS": f'[{{"name": "a", "backend": {{"plugin": "gauge", "engine_args": {{"hf_token": "{TOKEN}"}}}}}}]',
    "TINKER_API_KEY": KEY,
}
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
CREDENTIALS = {
    "TINSMITH_WORKER_KEY": WORKER_KEY,
    "HF_TOKEN": TOKEN,
    "HUGGING_FACE_HUB_TOKEN": TOKEN,
    HEADERS: f"authorization={TOKEN}",
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SETTINGS, **CREDENTIALS, "TINSMITH_OF_A_PLUGIN": "stays"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("planted")
def test_an_engine_gets_what_it_downloads_models_and_greets_workers_with() -> None:
    found = engine_environment()
    assert {name: found[name] for name in CREDENTIALS} == CREDENTIALS
    assert found["TINSMITH_OF_A_PLUGIN"] == "stays"
    assert not SETTINGS.keys() & found.keys()


def test_the_key_of_a_collector_of_traces_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS, "x-team=lab-of-ann,authorization=Basic%20b25seS1oZXJl")
    remember_credentials()
    assert cleaned("sent x-team lab-of-ann, Basic%20b25seS1oZXJl") == f"sent x-team {secrets.MASK}, {secrets.MASK}"


@pytest.mark.usefixtures("planted")
def test_a_server_leaves_no_setting_to_what_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    with_key = Settings.model_validate({"server": {"api_keys": [{"key": KEY, "tenant": "a"}]}})
    forget_settings_of_environment(with_key.server)
    assert "TINSMITH_SERVER__API_KEYS" not in os.environ
    assert "TINSMITH_STORE__URL" not in os.environ
    assert "come from the environment, so none can be revoked until this server stops" in caplog.text
    caplog.clear()
    forget_settings_of_environment(Settings().server)
    assert not caplog.text


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("launch_with", ["local", "host"])
def test_workers_get_their_key_alone(launch_with: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    class Started(Tethered):
        def __init__(self, command: list[str], *, env: dict[str, str]) -> None:
            del command
            tell = "import json, os; print(json.dumps(dict(os.environ)))"
            super().__init__([sys.executable, "-c", tell], stdout=subprocess.PIPE, env=env)
            started.append(json.loads(self.communicate()[0]))

    for module in (launching, command):
        monkeypatch.setattr(module, "Tethered", Started)
    launch = launching.Launch(
        config=WorkersConfig(nproc_per_node=2),
        environment={launching.COORDINATOR: "unix:/none", WORKER_KEY_VARIABLE: "of the group"},
        directory=tmp_path,
        gpus=False,
        default_per_node=1,
    )
    if launch_with == "local":
        launching.LocalProcesses(launch).close()
    else:
        command.run_host("h:1", processes=1, index=None, wait_s=0, again=False)
    key = WORKER_KEY if launch_with == "host" else "of the group"
    for environment in started:
        assert environment.pop(WORKER_KEY_VARIABLE) == key
        assert_clean(str(environment))
    assert started
