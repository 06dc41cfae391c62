"""Tests look at what others may see, too: not even by a string do they reach for a private name of ours.

Ruff (SLF001) refuses `thing._name`; each exception says why, and none is a name of ours. What it cannot see is here.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from syntax_trees import tree_of

ROOT = Path(__file__).parents[2]
EXCEPTIONS = {
    "_cache": "jax has no public way to forget which directory it compiles into",
    "_cache_write": "jax has no public way to write what another process of a mesh compiles",
    "_unsharded_param": "torch says nowhere else what FSDP has gathered",
}


def files() -> list[Path]:
    places = ("tests", "plugins/*/tests", "libraries/*/tests", "tools/*/tests")
    return [file for place in places for each in ROOT.glob(place) for file in each.rglob("*.py")]


def private_names(file: Path) -> Iterator[str]:
    """Private names that a file imports from a module of ours, or gives to `setattr`, `getattr` or `delattr`."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinsmith"):
            yield from (name.name for name in node.names if is_private(name.name))
        if isinstance(node, ast.Call) and called(node.func) in {"setattr", "getattr", "delattr"}:
            given = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            yield from (part for each in given for part in str(each).split(".") if is_private(part))


def called(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_test_reaches_for_a_private_name() -> None:
    found = {(file.name, name) for file in files() for name in private_names(file) if name not in EXCEPTIONS}
    assert not found, "hold what others see, or give the name to others"
