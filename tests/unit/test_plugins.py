"""Plugins as strangers install them: real distributions in a directory of their own on sys.path."""

import logging
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import typer
from fastapi import APIRouter
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry

import tinsmith
from tinsmith.commands.load_settings import load_settings
from tinsmith.errors import AuthenticationError, ConfigError, PluginError
from tinsmith.hook_values import RoutesContext, ServerStopping
from tinsmith.plugins.discovery import BUILTINS, HOOK_NAMES
from tinsmith.plugins.loading import Plugins
from tinsmith.plugins.registry import PluginOrigin, PluginReport, Registry
from tinsmith.server.limits.heavy_work import LargeAnswers
from tinsmith.settings import Settings
from tinsmith.settings.sources import Flag
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext

Install = Callable[..., None]

GOOD = """
    import tinsmith

    class Config(tinsmith.BackendConfig):
        width: int = 3

    def create(config, context):
        raise NotImplementedError

    @tinsmith.hookimpl
    def tinsmith_register_backends():
        return tinsmith.BackendSpec(name="{name}", config=Config, create=create)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one plugin module; the module's name is unique to the test's directory."""

    def install_one(
        distribution: str,
        source: str,
        *,
        plugin: str | None = None,
        module: str | None = None,
        requires: Sequence[str] = (),
    ) -> None:
        site = tmp_path / distribution
        plugin = plugin or distribution.replace("-", "_")
        module = module or f"{plugin}_of_{distribution.replace('-', '_')}"
        info = site / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n{needs}")
        (info / "entry_points.txt").write_text(f"[tinsmith]\n{plugin} = {module}\n")
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install_one


def row(plugins: Plugins, name: str) -> PluginReport:
    [found] = [each for each in plugins.report() if each.name == name]
    return found


def assert_builtins_work(plugins: Plugins) -> None:
    assert "cross_entropy" in plugins.losses.all()
    assert row(plugins, "losses").error is None


def test_a_stranger_is_found(install: Install) -> None:
    install("tin-good", GOOD.format(name="good"))
    plugins = Plugins.load()
    assert plugins.backends.get("good").config.model_fields["width"].default == 3
    assert "good" in plugins.backends.unambiguous()
    assert row(plugins, "tin_good") == PluginReport(
        name="tin_good", distribution="tin-good", version="1.2", offers=("backend good",)
    )


def test_builtins_are_whole_and_come_by_the_same_path() -> None:
    plugins = Plugins.load()
    rows = {each.name: each for each in plugins.report()}
    for name in BUILTINS:
        assert rows[name].error is None
        assert rows[name].distribution == "tinsmith"
    assert plugins.stores.get("sql").name == "sql"
    assert plugins.backends.get("toy").name == "toy"
    assert {"fair", "fifo"} <= set(plugins.schedulers.unambiguous())
    assert set(plugins.losses.all()) >= {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}


def test_a_broken_import_hurts_only_who_asks(install: Install) -> None:
    install("tin-broken", "import no_such_module_at_all\n", plugin="broken")
    install("tin-good", GOOD.format(name="good"))
    plugins = Plugins.load()
    assert plugins.backends.get("good")
    assert_builtins_work(plugins)
    with pytest.raises(PluginError) as caught:
        plugins.backends.get("broken")
    message = str(caught.value)
    installed = message.partition("no backend named 'broken', installed: ")[2].partition(";")[0].split(", ")
    assert "good" in installed
    assert "broken" not in installed
    assert "plugin 'broken' of tin-broken 1.2 is broken: No module named 'no_such_module_at_all'" in message
    assert "install what provides 'no_such_module_at_all'" in message
    assert row(plugins, "broken").error in message


@pytest.mark.parametrize("source", ["raise RuntimeError('at import')", "import sys\nsys.exit(3)", "def broken(:"])
def test_whatever_an_import_does_is_kept(install: Install, source: str) -> None:
    install("tin-broken", source, plugin="broken")
    plugins = Plugins.load()
    assert_builtins_work(plugins)
    error = row(plugins, "broken").error
    assert error is not None
    assert "uninstall tin-broken" in error


def test_a_misspelt_hook_is_that_plugins_error(install: Install) -> None:
    install("tin-misspelt", GOOD.format(name="misspelt").replace("register_backends", "registre_backends"))
    install("tin-good", GOOD.format(name="good"))
    plugins = Plugins.load()
    assert plugins.backends.get("good")
    error = row(plugins, "tin_misspelt").error
    assert error is not None
    assert "no hook 'tinsmith_registre_backends'; did you mean 'tinsmith_register_backends'?" in error


def test_a_hook_with_wrong_arguments_is_that_plugins_error(install: Install) -> None:
    install("tin-args", GOOD.format(name="args").replace("backends():", "backends(register):"))
    error = row(Plugins.load(), "tin_args").error
    assert error is not None
    assert "register" in error


def test_a_hook_without_its_mark_is_an_error(install: Install) -> None:
    install("tin-unmarked", GOOD.format(name="unmarked").replace("@tinsmith.hookimpl", ""))
    error = row(Plugins.load(), "tin_unmarked").error
    assert error is not None
    assert "write @tinsmith.hookimpl above it" in error


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ("'a string'", "returned 'a string' of type str; it must return a BackendSpec"),
        ("[create]", "of type function"),
        ("tinsmith.BackendSpec(name='', config=Config, create=create)", "must be a non-empty string"),
        ("tinsmith.BackendSpec(name='wrong', config=dict, create=create)", "must subclass BackendConfig"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_wrong_offer_is_that_plugins_error(install: Install, returned: str, complaint: str) -> None:
    whole = textwrap.dedent(GOOD).split("    return")[0] + f"    return {returned}\n"
    install("tin-wrong", whole)
    plugins = Plugins.load()
    assert_builtins_work(plugins)
    error = row(plugins, "tin_wrong").error
    assert error is not None
    assert complaint in error
    assert "wrong" not in plugins.backends.unambiguous()


def test_a_broken_plugin_takes_part_in_nothing(install: Install) -> None:
    """All or nothing: a plugin that fails half-way through registration neither decides nor observes."""
    decides = """
    @tinsmith.hookimpl
    def tinsmith_authenticate(headers):
        return tinsmith.Principal(tenant="intruder")
    """
    install("tin-half", textwrap.dedent(GOOD.format(name="")) + textwrap.dedent(decides))
    assert Plugins.load().authenticate({}) is None


@pytest.mark.parametrize("needs", ["tinsmith>=99", "tinsmith<0.1; python_version>'3'", "tinsmith~=99.1"])
def test_a_plugin_for_another_tinsmith_is_refused_unrun(install: Install, needs: str) -> None:
    """None of its code runs: what it would import from tinsmith may not be there."""
    install("tin-other", "raise SystemExit('it ran')", plugin="other", requires=("numpy", needs))
    install("tin-good", GOOD.format(name="good"), requires=("tinsmith~=0.1", "tinsmith>=99; extra == 'more'"))
    plugins = Plugins.load()
    assert plugins.backends.get("good")
    assert_builtins_work(plugins)
    wanted, core = needs.partition(";")[0], version("tinsmith")
    expected = (
        f"plugin 'other' of tin-other 1.2 is broken: it needs {wanted}, and this is tinsmith {core}; install a release "
        "of tin-other that admits it, or another tinsmith"
    )
    with pytest.raises(PluginError, match="no backend named 'other'") as caught:
        plugins.backends.get("other")
    assert str(caught.value).endswith(expected)
    assert row(plugins, "other").error == expected
    flags = [Flag("models.0.name", "m"), Flag("models.0.backend.plugin", "other")]
    with pytest.raises(ConfigError) as at_start:
        load_settings(plugins, file=None, environ={}, flags=flags)
    assert expected in str(at_start.value)


def test_a_requirement_that_is_none_is_that_plugins_error(install: Install) -> None:
    install("tin-vague", GOOD.format(name="vague"), plugin="vague", requires=("tinsmith=0.1",))
    install("tin-good", GOOD.format(name="good"))
    plugins = Plugins.load()
    assert plugins.backends.get("good")
    assert "reinstall or uninstall tin-vague" in str(row(plugins, "vague").error)


def test_two_offers_of_one_name_name_both_distributions(install: Install) -> None:
    install("tin-one", GOOD.format(name="same"))
    install("tin-two", GOOD.format(name="same"))
    install("tin-good", GOOD.format(name="good"))
    plugins = Plugins.load()
    with pytest.raises(PluginError, match=r"backend 'same' is offered by tin-one 1\.2 .* and tin-two 1\.2 .*uninstall"):
        plugins.backends.get("same")
    assert plugins.backends.get("good")
    assert "same" not in plugins.backends.unambiguous()
    for name in ("tin_one", "tin_two"):
        error = row(plugins, name).error
        assert error is not None
        assert "tin-one" in error
        assert "tin-two" in error


def test_one_plugin_name_in_two_distributions_is_fine(install: Install) -> None:
    install("tin-one", GOOD.format(name="first"), plugin="twin")
    install("tin-two", GOOD.format(name="second"), plugin="twin")
    plugins = Plugins.load()
    assert plugins.backends.get("first")
    assert plugins.backends.get("second")


def test_a_loss_offered_twice_is_refused() -> None:
    class Shadow:
        @tinsmith.hookimpl
        def tinsmith_register_losses(self) -> tinsmith.LossSpec:
            return tinsmith.LossSpec(name="ppo", inputs=(), per_token=lambda *_: (0, 0))

    plugins = Plugins.load([Shadow()])
    with pytest.raises(PluginError, match=r"loss 'ppo' is offered by tinsmith .* and \(this process\)"):
        plugins.losses.all()


def test_unknown_names_get_the_list_and_a_suggestion() -> None:
    registry: Registry[tinsmith.LossSpec] = Registry("loss", lambda _, similar: similar)
    specs = [tinsmith.LossSpec(name=name, inputs=(), per_token=lambda *_: (0, 0)) for name in ("ppo", "dro")]
    registry.add(specs, PluginOrigin(name="p", distribution="d", version="1"))
    with pytest.raises(PluginError) as caught:
        registry.get("pppo")
    assert str(caught.value) == "no loss named 'pppo', installed: dro, ppo; did you mean 'ppo'?"


class Observer:
    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[ServerStopping] = []

    @tinsmith.hookimpl
    def tinsmith_server_stopping(self, event: ServerStopping) -> None:
        if self.fails:
            message = "observer trouble"
            raise RuntimeError(message)
        self.seen.append(event)


def test_observers_cannot_disturb(caplog: pytest.LogCaptureFixture) -> None:
    before, after = Observer(), Observer()
    plugins = Plugins.load([before, Observer(fails=True), after])
    event = ServerStopping(url="http://here")
    with caplog.at_level(logging.ERROR, logger="tinsmith.plugins.loading"):
        plugins.server_stopping(event)
    assert before.seen == after.seen == [event]
    assert "failed in tinsmith_server_stopping" in caplog.text


class Door:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    @tinsmith.hookimpl
    def tinsmith_authenticate(self, headers: Mapping[str, str]) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if headers else None


def test_the_last_added_decides_first_and_none_passes_on() -> None:
    alice, bob = tinsmith.Principal(tenant="alice"), tinsmith.Principal(tenant="bob")
    plugins = Plugins.load([Door(alice), Door(bob), Door(None)])
    assert plugins.authenticate({"x-api-key": "tml-1"}) == bob


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (AuthenticationError("no"), AuthenticationError, "no"),
        (RuntimeError("database gone"), PluginError, "RuntimeError: database gone"),
        ("a string", PluginError, "must return Principal or None"),
    ],
)
def test_a_failing_decision_refuses(answer: object, expected: type[Exception], message: str) -> None:
    plugins = Plugins.load([Door(tinsmith.Principal(tenant="fallback")), Door(answer)])
    with pytest.raises(expected, match=message):
        plugins.authenticate({"x-api-key": "tml-1"})


class Extender:
    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    @tinsmith.hookimpl
    def tinsmith_register_routes(self, settings: Settings) -> list[APIRouter]:
        return ["not a router"] if self.fails else [APIRouter(prefix=f"/{settings.server.port}")]  # type: ignore[list-item]

    @tinsmith.hookimpl
    def tinsmith_register_commands(self, group: typer.Typer) -> None:
        if self.fails:
            message = "no commands today"
            raise RuntimeError(message)
        group.command("mine")(print)

    @tinsmith.hookimpl
    def tinsmith_resolve_base_model(self, name: str) -> Path | None:
        return Path("/models") / name if not self.fails else None


def a_routes_context(data_dir: Path) -> RoutesContext:
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=data_dir))
    return RoutesContext(
        store=store,
        registry=CollectorRegistry(),
        sampling=create_autospec(tinsmith.RouteSampling, instance=True),
        pending=store.list_pending,
        caller=lambda _: tinsmith.Principal(tenant="ann"),
        json_route=APIRoute,
        secret=bytes(32),
        own_run=lambda _, model_id: store.get_run(model_id),
        actor=lambda _: store.read(lambda _: {"actor": "ann"}),
        large_answer=LargeAnswers().build,
        disk_uses=lambda _: store.read(lambda _: []),
    )


def test_routes_commands_and_paths_of_a_good_plugin_survive_a_bad_one(tmp_path: Path) -> None:
    plugins = Plugins.load([Extender(fails=False), Extender(fails=True)])
    group = typer.Typer()
    plugins.add_commands(group)
    assert {"mine", "tiny-model"} <= {command.name for command in group.registered_commands}
    routers = {router.prefix for router in plugins.routes(Settings(), a_routes_context(tmp_path))}
    assert routers >= {"/8000", ""}, "its own, and the one of /metrics"
    assert plugins.resolve_base_model("a/b") == Path("/models/a/b")
    assert any("must return a APIRouter" in str(each.error) for each in plugins.report())


def test_there_is_one_registry_or_typed_method_per_hook() -> None:
    names = {name.removeprefix("tinsmith_").removeprefix("register_") for name in HOOK_NAMES}
    names = {"add_commands" if name == "commands" else name for name in names}
    assert names <= set(dir(Plugins.load()))
