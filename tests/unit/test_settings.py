"""Reading, merging and checking the configuration."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import Field

import tinsmith
from tinsmith.commands.load_settings import is_loopback, load_settings
from tinsmith.errors import ConfigError, UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ModelSettings, ServerSettings, Settings
from tinsmith.settings.sources import Flag


class GaugeConfig(tinsmith.BackendConfig):
    max_lora_rank: int = Field(8, ge=1)
    secret_token: str | None = None


class Gauge:
    """A backend with options and without a model directory, and one that needs a directory."""

    @tinsmith.hookimpl
    def tinsmith_register_backends(self) -> list[tinsmith.BackendSpec[GaugeConfig]]:
        def create(config: GaugeConfig, context: tinsmith.BackendContext) -> tinsmith.TrainingBackend:
            raise NotImplementedError

        return [
            tinsmith.BackendSpec(name="gauge", config=GaugeConfig, create=create, needs_model_path=False),
            tinsmith.BackendSpec(name="pathy", config=GaugeConfig, create=create),
        ]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load([Gauge()])


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        file = tmp_path / "tinsmith.yaml"
        file.write_text(text)
        return file

    return write_file


GOOD = """\
server:
  port: 8100
  data_dir: state
models:
  - name: tiny
    backend: {plugin: gauge, max_lora_rank: 4}
"""


def load(plugins: Plugins, *, flags=(), **sources) -> Settings:
    return load_settings(plugins, flags=[Flag(*flag) for flag in flags], **sources)


def failure(plugins: Plugins, file: Path | None = None, environ=None, flags=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(plugins, file=file, environ=environ or {}, flags=flags)
    return str(caught.value)


def test_the_data_directory_has_a_place_of_its_own_for_each_base_model() -> None:
    data_dir = Settings(server=ServerSettings(data_dir=Path("~/x"))).data_dir
    assert data_dir.root == Path.home() / "x"
    assert data_dir.recovery_points("org/toy") == data_dir.root / "recovery" / "org%2Ftoy"
    assert data_dir.cache("jax", "org/toy") == data_dir.root / "cache" / "jax" / "org%2Ftoy"
    assert data_dir.engine_settings("toy") == data_dir.root / "engines" / "toy.json"
    assert data_dir.engine_settings("toy", server="host-8000") == data_dir.root / "engines" / "toy@host-8000.json"


def test_a_model_is_found_by_its_name() -> None:
    settings = Settings(models=(ModelSettings(name="tim"), ModelSettings(name="tom")))
    assert settings.model("tom") is settings.models[1]
    with pytest.raises(UserError, match="no base model named 'tam'; available: 'tim', 'tom'"):
        settings.model("tam")
    with pytest.raises(UserError, match="available: none"):
        Settings().model("tam")


def test_a_file(plugins: Plugins, write) -> None:
    settings = load(plugins, file=write(GOOD), environ={})
    assert settings.server.port == 8100
    assert settings.server.data_dir == Path.cwd() / "state"
    assert settings.models[0].backend is not None
    assert settings.models[0].backend.options() == {"max_lora_rank": 4}
    assert settings.store.plugin == "sql"


def test_the_file_may_be_named_by_the_environment(plugins: Plugins, write) -> None:
    settings = load(plugins, environ={"TINSMITH_CONFIG": str(write(GOOD))})
    assert settings.models[0].name == "tiny"


def test_precedence_is_flags_then_environment_then_file_then_defaults(plugins: Plugins, write) -> None:
    file = write(GOOD)
    environ = {"TINSMITH_SERVER__PORT": "8200", "TINSMITH_MODELS__0__BACKEND__MAX_LORA_RANK": "5"}
    flags = [("server.port", "8300")]
    assert load(plugins, file=file, environ=environ, flags=flags).server.port == 8300
    assert load(plugins, file=file, environ=environ).server.port == 8200
    assert load(plugins, file=file, environ={}).server.port == 8100
    assert load(plugins, environ={}, flags=[("models", "[{name: a, backend: {plugin: gauge}}]")]).server == (
        Settings().server.model_copy(update={"data_dir": Path("~/.tinsmith").expanduser()})
    )


def test_one_key_of_a_list_item_can_be_replaced_and_the_rest_stays(plugins: Plugins, write) -> None:
    environ = {"TINSMITH_MODELS__0__NAME": "renamed"}
    [model] = load(plugins, file=write(GOOD), environ=environ).models
    assert model.name == "renamed"
    assert model.backend is not None
    assert model.backend.options() == {"max_lora_rank": 4}


def test_a_whole_list_can_be_given_as_json_and_replaces_the_files(plugins: Plugins, write) -> None:
    environ = {"TINSMITH_MODELS": '[{"name": "other", "backend": {"plugin": "gauge"}}]'}
    [model] = load(plugins, file=write(GOOD), environ=environ).models
    assert model.name == "other"
    assert model.backend is not None
    assert model.backend.options() == {}


def test_everything_wrong_is_reported_at_once_with_its_source(plugins: Plugins, write) -> None:
    file = write(
        "server:\n"
        "  prot: 8100\n"
        "  port: high\n"
        "store: {plugin: sqll}\n"
        "models:\n"
        "  - name: tiny\n"
        "    backend:\n"
        "      plugin: gauge\n"
        "      max_lora_rnak: 4\n"
        "      max_lora_rank: 0\n"
    )
    message = failure(plugins, file, {"TINSMITH_SCHEDULER__PLUGIN": "fare"}, [("server.long_poll_s", "99")])
    assert message.startswith("7 problems in the configuration:\n")
    lines = message.splitlines()[1:]

    def line(start: str) -> str:
        [found] = [each.strip() for each in lines if each.strip().startswith(start)]
        return found

    prot = line(f"{file}:2: server.prot: ")
    assert "unknown key, allowed: api_keys, api_keys_file, audit_retention_s, data_dir, " in prot
    assert prot.endswith("; did you mean 'port'?")
    assert "valid integer" in line(f"{file}:3: server.port: ")
    assert "got 'high'" in line(f"{file}:3: server.port: ")
    assert "no store named 'sqll', installed: memory, sql; did you mean 'sql'?" in line(f"{file}:4: store.plugin: ")
    assert "did you mean 'max_lora_rank'?" in line(f"{file}:9: models.0.backend.max_lora_rnak: unknown key")
    assert "greater than or equal to 1, got 0" in line(f"{file}:10: models.0.backend.max_lora_rank: ")
    assert "no scheduler named 'fare'" in line("TINSMITH_SCHEDULER__PLUGIN: scheduler.plugin: ")
    assert "less than 45" in line("--server.long_poll_s: server.long_poll_s: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server:\n  port: [1\n", "tinsmith.yaml:3: not valid YAML: expected ',' or ']'"),
        ("- a\n- b\n", ":1: expected a mapping"),
        ("server: &s\n  port: *s\n", ":1: server.port is an alias of a value that contains it; write its value out"),
        ("models: &m [*m]\n", ":1: models.0 is an alias of a value that contains it"),
        ("server: {port: 1}\nserver: {port: 2}\n", ":2: server is already set in line 1; keep one"),
        ("server:\n  port: 1\n  port: 2\n", ":3: server.port is already set in line 2"),
        ("models:\n  - {name: a, backend: {plugin: gauge}}\n  - {name: a, backend: {plugin: gauge}}\n", "'a' occurs 2"),
        ("models: []\n", "no model to serve; give `tinsmith serve MODEL`"),
        ("models:\n  - {backend: {plugin: gauge}}\n", "models.0.name: field required; add it"),
        ("models:\n  - {name: 7, backend: {plugin: gauge}}\n", "got 7; put it in quotes"),
        ("models:\n  - {name: a, backend: gauge}\n", "models.0.backend: "),
        (
            "servers: {}\n",
            "servers: unknown key, allowed: login, losses, models, quotas, recovery, scheduler, server, store, "
            "supervisor, tracing, watchdog; did you mean 'server'?",
        ),
    ],
)
def test_a_bad_file_is_refused_with_the_line(plugins: Plugins, write, text: str, expected: str) -> None:
    message = failure(plugins, write(text))
    assert expected in message
    assert "tinsmith.yaml" in message


def test_an_empty_mapping_sets_nothing(plugins: Plugins, write) -> None:
    assert failure(plugins, write("{}\n")).startswith("models: no model to serve")


def test_a_missing_file(plugins: Plugins) -> None:
    assert "cannot read the configuration file 'nowhere.yaml': No such file" in failure(plugins, Path("nowhere.yaml"))


def test_a_variable_without_its_section_is_not_ignored(plugins: Plugins, write) -> None:
    message = failure(plugins, write(GOOD), {"TINSMITH_PORT": "1"})
    assert message == "TINSMITH_PORT: no such setting; did you mean TINSMITH_SERVER__PORT?"


def test_an_unknown_key_in_a_variable(plugins: Plugins, write) -> None:
    message = failure(plugins, write(GOOD), {"TINSMITH_SERVER__PROT": "1"})
    assert message.startswith("TINSMITH_SERVER__PROT: server.prot: unknown key, allowed: api_keys, ")


def test_a_plugins_own_variable_is_left_alone(plugins: Plugins, write) -> None:
    assert load(plugins, file=write(GOOD), environ={"TINSMITH_WEATHER_STATION": "7"})


def test_engines_are_started_of_configured_models_alone(plugins: Plugins, write) -> None:
    message = failure(plugins, write(GOOD), flags=[("supervisor.engines", "[tiny, tony]")])
    assert message == "--supervisor.engines: supervisor.engines.1: no base model named 'tony'; available: 'tiny'"
    assert load(plugins, file=write(GOOD), environ={}).supervisor.engines is None
    assert load(plugins, file=write(GOOD), environ={"TINSMITH_SUPERVISOR__ENGINES": "[]"}).supervisor.engines == ()


def test_other_addresses_need_keys(plugins: Plugins, write) -> None:
    file = write(GOOD)
    message = failure(plugins, file, flags=[("server.host", "0.0.0.0")])
    assert "--server.host: server.host: refused" in message
    assert "add `server.api_keys` or `login`, or listen on 127.0.0.1" in message
    keys = [("server.host", "0.0.0.0"), ("server.api_keys", "[{key: tml-abc, tenant: alice}]")]
    assert load(plugins, file=file, environ={}, flags=keys).server.api_keys[0].tenant == "alice"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("h", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_keys_that_the_sdk_refuses_are_refused_and_never_shown(plugins: Plugins, write) -> None:
    message = failure(plugins, write(GOOD), flags=[("server.api_keys", "[{key: hunter2, tenant: alice}]")])
    assert "server.api_keys.0.key: the SDK refuses keys that do not start with 'tml-'" in message
    assert "hunter2" not in message
    message = failure(plugins, write(GOOD), flags=[("models.0.backend.secret_token", "[hunter2]")])
    assert "models.0.backend.secret_token: " in message
    assert "hunter2" not in message


def test_a_key_for_two_tenants_is_refused_with_both_places(plugins: Plugins, write, tmp_path: Path) -> None:
    own = tmp_path / "keys.yaml"
    own.write_text("# more\n- key: tml-abc\n  tenant: bob\n")
    keys = f"  api_keys_file: {own}\n  api_keys:\n    - tenant: alice\n      key: tml-abc\n"
    file = write(GOOD.replace("models:", f"{keys}models:"))
    message = failure(plugins, file)
    line = file.read_text().splitlines().index("      key: tml-abc") + 1
    assert message.startswith(
        f"{own}:2: server.api_keys.1.key: is the key of server.api_keys.0 again ({file}:{line}), "
    )
    assert "tml-abc" not in message


def test_what_is_wrong_with_a_file_of_keys_is_told_with_its_line(plugins: Plugins, write, tmp_path: Path) -> None:
    own = tmp_path / "keys.yaml"
    file = write(GOOD.replace("models:", f"  api_keys_file: {own}\nmodels:"))
    assert f"cannot read the file of API keys {str(own)!r}: No such file" in failure(plugins, file)
    for content, words in (
        ("tml-abc: alice\n", f"{own}:1: expected a list"),
        ("- {key: tml-abc}\n", f"{own}:1: server.api_keys.0.tenant: field required"),
        (
            "- {key: sha256:abc, tenant: alice}\n",
            f"{own}:1: server.api_keys.0.key: 'sha256:' is not followed by the 64",
        ),
        ("- {key: abc, tenant: alice}\n", "the SDK refuses keys that do not start with 'tml-'"),
        ("- {key: [", f"{own}:"),
    ):
        own.write_text(content)
        message = failure(plugins, file)
        assert words in message
        assert "tml-abc" not in message


def test_a_model_directory_is_found_by_name_or_path(plugins: Plugins, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    flags = [("models.0.name", str(tmp_path)), ("models.0.backend.plugin", "pathy")]
    [model] = load(plugins, environ={}, flags=flags).models
    assert model.path == tmp_path
    flags = [("models.0.name", "x/y"), ("models.0.path", str(tmp_path)), ("models.0.backend.plugin", "pathy")]
    [model] = load(plugins, environ={}, flags=flags).models
    assert model.path == tmp_path


def test_a_model_is_found_in_the_hugging_face_cache(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--Maker--Tiny"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    flags = [("models.0.name", "Maker/Tiny"), ("models.0.backend.plugin", "pathy")]
    [model] = load(plugins, environ={}, flags=flags).models
    assert model.path == snapshot
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    [model] = load(plugins, environ={}, flags=[*flags, ("models.0.revision", "v2")]).models
    assert model.path is None  # another revision is not here, so the engine downloads it
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    )
    [model] = load(plugins, environ={}, flags=flags).models
    assert model.path is None  # a shard is missing


def test_the_engine_accepts_the_settings_of_a_revision_that_is_in_the_cache(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--Maker--Tiny" / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    backend = ("models.0.backend.plugin", "pathy")
    flags = [("models.0.name", "Maker/Tiny"), ("models.0.revision", "abc123"), backend]
    settings = load(plugins, environ={}, flags=flags)
    file = tmp_path / "engine.json"  # as a supervisor writes it
    file.write_text(json.dumps(settings.model_dump(mode="json", exclude_none=True)))
    assert load(plugins, environ={}, file=file).models[0].path == snapshot


def test_a_name_on_the_hub_is_left_to_the_engine(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [("models.0.name", "no/such"), ("models.0.backend.plugin", "pathy")]
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert load(plugins, environ={}, flags=flags).models[0].path is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = failure(plugins, flags=flags)
    assert "--models.0.name: models.0.name: 'no/such' is neither a directory nor complete in the cache" in message
    assert "HF_HUB_OFFLINE forbids downloading it" in message


def test_a_missing_model_directory_is_refused(plugins: Plugins, tmp_path: Path) -> None:
    backend = ("models.0.backend.plugin", "pathy")
    message = failure(plugins, flags=[("models.0.name", "/no/such"), backend])
    assert "--models.0.name: models.0.name: '/no/such' is neither a directory nor a name that a model" in message
    flags = [("models.0.name", "n"), ("models.0.path", str(tmp_path)), ("models.0.revision", "v2"), backend]
    assert "models.0.revision: only a model from the hub has one" in failure(plugins, flags=flags)
    message = failure(plugins, flags=[("models.0.name", "n"), ("models.0.path", str(tmp_path / "gone")), backend])
    assert "--models.0.path: models.0.path: there is no directory" in message
    message = failure(plugins, flags=[("models.0.name", str(tmp_path)), backend])
    assert "holds no config.json" in message


def test_the_default_backend_is_the_one_installed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    flags = [("models.0.name", str(tmp_path))]

    class One:
        @tinsmith.hookimpl
        def tinsmith_register_backends(self) -> tinsmith.BackendSpec[GaugeConfig]:
            return Gauge().tinsmith_register_backends()[1]

    only = Plugins()
    only.add(One())
    spec = only.default_backend()
    assert spec.name == "pathy"
    message = failure(Plugins.load([Gauge()]), flags=flags)
    assert "several backends are installed: gauge, " in message

    class TrainsOnly:
        @tinsmith.hookimpl
        def tinsmith_register_backends(self) -> tinsmith.BackendSpec[GaugeConfig]:
            return replace(Gauge().tinsmith_register_backends()[1], name="trainer", samples=False)

    only.add(TrainsOnly())
    assert only.default_backend().name == "pathy"
    none = Plugins()
    assert "no backend is installed" in failure(none, flags=flags)
