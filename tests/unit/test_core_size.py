"""The core proper may only shrink: its lines, and the methods of the store's interface."""

import ast
from pathlib import Path
from typing import NamedTuple

import syntax_trees

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "tinsmith"
BAR = ROOT / "core" / "size.txt"
BESIDE = ("features", "testing")
"""A feature is a folder that can be deleted; the suites are for tests."""


class Size(NamedTuple):
    lines: int
    methods: int


def size_now() -> Size:
    files = [file for file in CORE.rglob("*.py") if file.relative_to(CORE).parts[0] not in BESIDE]
    (store,) = (
        node
        for node in syntax_trees.tree_of(CORE / "store" / "request_store.py").body
        if isinstance(node, ast.ClassDef) and node.name == "RequestStore"
    )
    methods = [node for node in store.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Size(sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files), len(methods))


def bars() -> list[tuple[Size, str]]:
    rows = [line.split(maxsplit=2) for line in BAR.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    return [(Size(int(lines), int(methods)), why) for lines, methods, why in rows]


def test_the_core_is_not_larger_than_the_bar() -> None:
    (most, _), now = bars()[-1], size_now()
    assert now.lines <= most.lines, "make a folder in features, or add a line to core/size.txt that says why"
    assert now.methods <= most.methods, "keep it in tables of a package, or add a line to core/size.txt that says why"


def test_each_rise_of_the_bar_has_a_reason() -> None:
    rows = bars()
    assert all(len(why.split()) > 3 for _, why in rows)
