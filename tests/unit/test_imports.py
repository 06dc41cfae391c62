"""What may be imported where: checked in a fresh process, since this one has imported everything."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import syntax_trees

ROOT = Path(__file__).parents[2]
PACKAGES = {
    package.name: package
    for folder in ("core", "plugins/*", "libraries/*", "tools/*")
    for package in ROOT.glob(f"{folder}/tinsmith*")
    if package.is_dir()
}


def test_loading_every_plugin_and_the_server_imports_no_framework_and_no_client_of_the_hub() -> None:
    """The command line and an engine need no web framework, either, and start in two thirds of the time without."""
    code = """
        import sys
        import tinsmith.commands.cli, tinsmith.plugins.loading, tinsmith.processes.engine
        plugins = tinsmith.plugins.loading.Plugins.load()
        assert plugins.report()
        tinsmith.commands.cli.build_group(plugins)
        of_servers = {"fastapi", "starlette", "uvicorn", "jwt", "prometheus_client"} & set(sys.modules)
        assert not of_servers, of_servers
        import tinsmith.server.app
        heavy = {"jax", "jaxlib", "torch", "transformers", "vllm", "megatron", "huggingface_hub"} & set(sys.modules)
        assert not heavy, heavy
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def imported(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(syntax_trees.tree_of(file)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] in PACKAGES:
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def is_there(module: str, name: str) -> bool:
    """Return whether a module, or a package, has something of that name: by its text, so that nothing is imported."""
    package, *rest = module.split(".")
    path = PACKAGES[package].joinpath(*rest)
    if (path / name).is_dir() or (path / f"{name}.py").exists():
        return True
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return False
    nodes = list(ast.walk(syntax_trees.tree_of(file)))
    named = {each for node in nodes for each in (getattr(node, what, None) for what in ("name", "id", "asname"))}
    return name in named or any(
        is_there(node.module or "", name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    )


def test_what_runs_on_a_card_alone_imports_what_is_there() -> None:
    """Nothing else collects these files, and a card is lent for minutes."""
    files = [file for folder in ("tests/gpu", "benchmarks", "deploy") for file in (ROOT / folder).rglob("*.py")]
    asked = {(file.name, *each) for file in files for each in imported(file)}
    assert len(asked) > 100
    assert [each for each in sorted(asked) if not is_there(*each[1:])] == []
