"""The names that plugin authors import: complete, and enough for a plugin of every kind."""

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import httpx
import pytest
import typer
from fastapi import APIRouter, Depends
from typer.testing import CliRunner

import tinsmith
import tinsmith.testing
from tinsmith.authoring.new_plugin import PluginKind, write_plugin
from tinsmith.plugins.hook_caller import HOOK_NAMES
from tinsmith.plugins.loading import Plugins
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import running_server

CONTRACT = ("backend", "errors", "hook_values", "operations", "scheduler", "store")


def imported_names(module: ModuleType) -> set[str]:
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return names - {"Final", "TYPE_CHECKING", "import_module"}


def test_what_is_imported_is_what_is_exported() -> None:
    for module in (tinsmith, tinsmith.testing):
        assert set(module.__all__) == imported_names(module)


def test_exports_are_there() -> None:
    for module in (tinsmith, tinsmith.testing):
        assert len(set(module.__all__)) == len(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="module 'tinsmith' has no attribute 'SqlStores'"):
        tinsmith.SqlStores  # noqa: B018


@pytest.mark.parametrize("name", CONTRACT)
def test_everything_that_the_contract_defines_is_exported(name: str) -> None:
    module = import_module(f"tinsmith.{name}")
    here = (module.__name__, f"{module.__name__}.records", f"{module.__name__}.request_store")
    defined = {key for key, value in vars(module).items() if getattr(value, "__module__", None) in here}
    missing = {each for each in defined if not each.startswith("_") and len(each) > 1} - set(tinsmith.__all__)
    assert not missing, f"defined in tinsmith.{name}, and not exported from tinsmith: {sorted(missing)}"


def test_the_package_is_typed() -> None:
    assert tinsmith.__file__ is not None
    assert (Path(tinsmith.__file__).parent / "py.typed").is_file()


def modules_of_ours(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name is not None and name.split(".")[0] == "tinsmith")


@pytest.mark.parametrize("kind", PluginKind)
def test_a_new_plugin_needs_public_names_alone(kind: PluginKind, tmp_path: Path) -> None:
    """`tests/contract/test_new_plugins.py` runs the suite of each."""
    root = write_plugin("on-trial", kind, tmp_path / "it", installed=())
    used = {name for file in root.rglob("*.py") for name in modules_of_ours(file.read_text())}
    assert used == {"tinsmith", "tinsmith.testing"}


class Greeter:
    """A plugin with the hooks that offer nothing to choose, written against `tinsmith` alone."""

    def __init__(self, models: Path) -> None:
        self.models = models
        self.seen: list[object] = []

    @tinsmith.hookimpl
    def tinsmith_register_routes(self, settings: tinsmith.Settings, context: tinsmith.RoutesContext) -> APIRouter:
        router = APIRouter()

        @router.get("/hello")
        def hello(caller: Annotated[tinsmith.Principal, Depends(context.caller)]) -> dict[str, str]:
            return {"hello": caller.tenant, "models": ", ".join(model.name for model in settings.models)}

        return router

    @tinsmith.hookimpl
    def tinsmith_register_commands(self, group: typer.Typer) -> None:
        @group.command("greet")
        def greet() -> None:
            typer.echo("hello")

    @tinsmith.hookimpl
    def tinsmith_authenticate(self, headers: Mapping[str, str]) -> tinsmith.Principal | None:
        if "x-banned" in headers:
            msg = "you are banned"
            raise tinsmith.AuthenticationError(msg)
        return tinsmith.Principal(tenant=headers["x-name"]) if "x-name" in headers else None

    @tinsmith.hookimpl
    def tinsmith_resolve_base_model(self, name: str) -> Path | None:
        return self.models / name

    @tinsmith.hookimpl
    def tinsmith_server_started(self, event: tinsmith.ServerStarted) -> None:
        self.seen.append(event)

    @tinsmith.hookimpl
    def tinsmith_operation_finished(self, event: tinsmith.OperationFinished) -> None:
        self.seen.append(event)

    @tinsmith.hookimpl
    def tinsmith_server_stopping(self, event: tinsmith.ServerStopping) -> None:
        self.seen.append(event)


def test_a_plugin_with_every_other_hook_needs_public_names_alone(tmp_path: Path) -> None:
    """Not with `ServerStarted` and `ServerStopping`, which the process sends: `tests/e2e/test_serve.py` sees them."""
    greeter = Greeter(tmp_path)
    with running_server(tmp_path, extra_plugins=[greeter]) as server, httpx.Client(base_url=server.url) as http:
        said = http.get("/hello", headers={"x-name": "ada"})
        assert said.json() == {"hello": "ada", "models": "toy"}
        assert http.get("/hello", headers={"x-banned": "yes"}).status_code == 401
        client = EngineDriver(server.store, "toy")
        server.call(client.open_session())
        server.call(client.result(server.call(client.create_model())))
    assert [event.kind for event in greeter.seen if isinstance(event, tinsmith.OperationFinished)] == ["create_model"]
    plugins, group = Plugins.load([greeter]), typer.Typer()
    assert plugins.resolve_base_model("small") == tmp_path / "small"
    group.callback()(lambda: None)
    plugins.add_commands(group)
    assert "hello" in CliRunner().invoke(group, ["greet"]).output
    offered = {hook for hook in HOOK_NAMES if "register" in hook and hasattr(greeter, hook)}
    kinds = {f"tinsmith_register_{kind}s" for kind in PluginKind} - {"tinsmith_register_losss"}
    assert offered | kinds | {"tinsmith_register_losses"} == {hook for hook in HOOK_NAMES if "register" in hook}
