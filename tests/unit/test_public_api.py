"""The names that plugin authors import: no more than they use, and enough for a plugin of every kind."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated

import httpx
import pytest
import syntax_trees
import typer
from fastapi import APIRouter, Depends
from typer.testing import CliRunner

import tinsmith
from tinsmith.authoring.new_plugin import PluginKind, write_plugin
from tinsmith.logins import LoginSpec
from tinsmith.plugins.discovery import HOOK_NAMES
from tinsmith.plugins.loading import Plugins
from tinsmith.tables import Tables, TablesSpec, named_metadata
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import running_server
from tinsmith.tracing import BatchFinished, RequestFinished, Tracer, TracerSpec

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "tinsmith"
WORKERS = ROOT / "libraries" / "workers"
SKELETONS = CORE / "authoring" / "skeletons"
OF_FEATURES = ("tinsmith.tables", "tinsmith.command_line")
PUBLIC = {
    **dict.fromkeys(
        (
            *("tinsmith", "tinsmith.stores", "tinsmith.machine", "tinsmith.logins", "tinsmith.tracing"),
            *("tinsmith.testing", *OF_FEATURES),
        ),
        ROOT / "core",
    ),
    "tinsmith_checkpoints.huggingface": ROOT / "libraries/checkpoints",
    **dict.fromkeys(
        ("tinsmith_workers", "tinsmith_workers.torch", "tinsmith_workers.testing"), ROOT / "libraries/workers"
    ),
}


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of all that a file imports from somewhere."""
    for node in ast.walk(syntax_trees.tree_of(file)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def source_of(module: str) -> Path:
    path = PUBLIC[module].joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exported(module: str) -> list[str]:
    """Return `__all__` as it is written: torch need not be imported."""
    assigned = [node for node in syntax_trees.tree_of(source_of(module)).body if isinstance(node, ast.Assign)]
    return list(ast.literal_eval(assigned[-1].value))


@pytest.mark.parametrize("module", PUBLIC)
def test_what_is_imported_is_what_is_exported(module: str) -> None:
    names, imported = exported(module), {name: origin for origin, name in imports(source_of(module))}
    everything = vars(import_module(imported.pop("*"))) if "*" in imported else {}
    assert imported.keys() <= set(names) <= imported.keys() | everything.keys()
    assert len(set(names)) == len(names)


def test_the_public_names_of_the_core_fit_a_head() -> None:
    """What plugins implement or receive, the toolbox for backends, and the suites for tests."""
    of_core = [module for module, root in PUBLIC.items() if root == ROOT / "core" and module not in OF_FEATURES]
    assert sum(len(exported(module)) for module in of_core) <= 140


def test_the_names_for_features_fit_a_page() -> None:
    """What a package needs that keeps something; no backend does."""
    assert sum(len(exported(module)) for module in OF_FEATURES) <= 30


def test_every_module_that_plugins_may_import_is_counted() -> None:
    """The import contract of the plugins says which."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (of_plugins,) = (each for each in contracts if each["name"].startswith("plugins import what is public: "))
    allowed = {imported.rpartition(" -> ")[2] for imported in of_plugins["ignore_imports"]}
    assert (
        allowed | {*OF_FEATURES, "tinsmith", "tinsmith.testing", "tinsmith_workers.testing", "tinsmith_workers"}
        == PUBLIC.keys()
    )


def used_by(*directories: Path) -> dict[str, set[str]]:
    used: dict[str, set[str]] = defaultdict(set)
    for module, name in (
        each for directory in directories for file in directory.rglob("*.py") for each in imports(file)
    ):
        used[module].add(name)
    return used


def attributes(directory: Path) -> set[str]:
    """Return what files take from `tinsmith` as its attribute."""
    nodes = (node for file in directory.rglob("*.py") for node in ast.walk(syntax_trees.tree_of(file)))
    taken = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    return {node.attr for node in taken if isinstance(node.value, ast.Name) and node.value.id == "tinsmith"}


def test_a_name_is_public_because_an_author_uses_it() -> None:
    """In a plugin or its tests, in a skeleton, or in an example of the documentation."""
    used = used_by(*(ROOT / "plugins").glob("*_*"), CORE / "features", SKELETONS, ROOT / "tests", WORKERS / "tests")
    used["tinsmith"] |= attributes(ROOT / "plugins")
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md") if page.name != "public-names.md")
    texts = (
        pages + "".join(file.read_text() for file in SKELETONS.iterdir() if file.is_file()) + Path(__file__).read_text()
    )
    idle = {
        f"{module}.{name}"
        for module in PUBLIC
        for name in exported(module)
        if name not in used[module] and not re.search(rf"\b{name}\b", texts)
    }
    assert not idle


def test_the_package_is_typed() -> None:
    assert tinsmith.__file__ is not None
    assert (Path(tinsmith.__file__).parent / "py.typed").is_file()


def modules_of_ours(source: str) -> Iterator[str]:
    for node in ast.walk(syntax_trees.parse(source)):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name is not None and name.split(".")[0] == "tinsmith")


@pytest.mark.parametrize("kind", PluginKind)
def test_a_new_plugin_needs_public_names_alone(kind: PluginKind, tmp_path: Path) -> None:
    """`tests/contract/test_new_plugins.py` runs the suite of each."""
    root = write_plugin("on-trial", kind, tmp_path / "it", installed=())
    used = {name for file in root.rglob("*.py") for name in modules_of_ours(file.read_text())}
    assert used == {"tinsmith", "tinsmith.testing"} | ({"tinsmith.stores"} if kind is PluginKind.STORE else set())


class Noting(Tracer):
    def __init__(self, config: tinsmith.BackendConfig, process: str) -> None:
        self.process = process

    def request_finished(self, event: RequestFinished) -> None:
        NOTED.append((self.process, event.route))

    def batch_finished(self, event: BatchFinished) -> None:
        NOTED.extend((self.process, each.kind) for each in event.operations)

    def close(self) -> None:
        NOTED.append((self.process, "closed"))


NOTED: list[tuple[str, str]] = []


class Greeter:
    """A plugin with the hooks that offer nothing to choose, written against `tinsmith` alone."""

    def __init__(self, models: Path) -> None:
        self.models = models
        self.seen: list[object] = []

    @tinsmith.hookimpl
    def tinsmith_register_logins(self) -> LoginSpec[tinsmith.BackendConfig]:
        return LoginSpec(name="greeting", config=tinsmith.BackendConfig)

    @tinsmith.hookimpl
    def tinsmith_register_tracers(self) -> TracerSpec[tinsmith.BackendConfig]:
        return TracerSpec(name="noting", config=tinsmith.BackendConfig, create=Noting)

    @tinsmith.hookimpl
    def tinsmith_register_tables(self) -> TablesSpec:
        return TablesSpec(name="greetings", create=lambda: Tables(metadata=named_metadata()))

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
    tracing = {"plugin": "noting"}
    with (
        running_server(tmp_path, extra_plugins=[greeter], tracing=tracing) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        said = http.get("/hello", headers={"x-name": "ada"})
        assert said.json() == {"hello": "ada", "models": "toy"}
        assert http.get("/hello", headers={"x-banned": "yes"}).status_code == 401
        client = EngineDriver(server.store, "toy")
        server.call(client.open_session())
        server.call(client.result(server.call(client.create_model())))
    assert [event.kind for event in greeter.seen if isinstance(event, tinsmith.OperationFinished)] == ["create_model"]
    assert NOTED[:3] == [("server", "/hello"), ("server", "/hello"), ("engine", "create_model")]
    assert NOTED[3:] == [("engine", "closed"), ("server", "closed")]
    plugins, group = Plugins.load([greeter]), typer.Typer()
    assert plugins.resolve_base_model("small") == tmp_path / "small"
    group.callback()(lambda: None)
    plugins.add_commands(group)
    assert "hello" in CliRunner().invoke(group, ["greet"]).output
    offered = {hook for hook in HOOK_NAMES if "register" in hook and hasattr(greeter, hook)}
    kinds = {f"tinsmith_register_{kind}s" for kind in PluginKind} - {"tinsmith_register_losss"}
    assert offered | kinds | {"tinsmith_register_losses"} == {hook for hook in HOOK_NAMES if "register" in hook}
