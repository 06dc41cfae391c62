"""What the distributions require of others: whoever's internals are used has a ceiling."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import syntax_trees
from packaging.requirements import Requirement

_ROOT = Path(__file__).parents[2]
_DISTRIBUTIONS = {
    "core": (_ROOT / "pyproject.toml", _ROOT / "core/tinsmith"),
    **{path.parent.name: (path, path.parent) for path in sorted(_ROOT.glob("*/*/pyproject.toml"))},
}
_SUBCLASSED = {"core": {"uvicorn"}}  # documented by nobody, though without an underscore
_NO_DEPENDENCIES = sys.stdlib_module_names | {"tinsmith"}


@pytest.mark.parametrize("name", _DISTRIBUTIONS)
def test_packages_whose_internals_are_used_have_a_ceiling(name: str) -> None:
    pyproject, sources = _DISTRIBUTIONS[name]
    used = _SUBCLASSED.get(name, set()) | {
        package
        for source in sources.rglob("*.py")
        if "tests" not in source.relative_to(sources).parts
        for package in _internals(syntax_trees.tree_of(source))
    }
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    required = [Requirement(each) for each in [*project["dependencies"], *(one for extra in extras for one in extra)]]
    bounded = {each.name for each in required if any(one.operator in {"<", "<=", "==", "~="} for one in each.specifier)}
    assert used - bounded - _NO_DEPENDENCIES == set(), f"{pyproject}: give these an upper bound"


def test_internals_are_recognised() -> None:
    code = (
        "import torch\nimport a.b as c\nfrom jax._src import x\nfrom d.e import f\n"  # imports
        "torch._foo()\nc._x\nf._own\nself._y"  # uses
    )
    assert set(_internals(syntax_trees.parse(code))) == {"torch", "jax", "a"}


def _internals(module: ast.Module) -> Iterator[str]:
    """Yield the packages of whose modules a private name is imported or used."""
    modules: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            modules |= {each.asname or _package(each.name): _package(each.name) for each in node.names}
            yield from (_package(each.name) for each in node.names if _is_private(each.name))
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (_package(node.module) for each in node.names if _is_private(f"{node.module}.{each.name}"))
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                yield modules[root.id]


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
