"""Reads Python files as syntax trees, for the pages that are made of them and the tests that hold them."""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path


def parse(text: str) -> ast.Module:
    """Return the syntax tree of ``text``.

    No garbage is collected meanwhile. A finalizer runs Python code, which lets other threads run; one that parses too
    (CPython 3.11 does so to print a traceback) breaks this parse with "AST constructor recursion depth mismatch",
    because the interpreter counts the depth of all parses in one variable.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)  # noqa: TID251 - this is the one place
    finally:
        if collects:
            gc.enable()


def tree_of(file: Path) -> ast.Module:
    """Return the syntax tree of a Python file."""
    return parse(file.read_text(encoding="utf-8"))


def named(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield all nodes, each with the name of the function around it."""
    for node in ast.iter_child_nodes(tree):
        own = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        here = ".".join(filter(None, (name, node.name))) if own else name
        yield here, node
        yield from named(node, here)


def has_test(root: Path, test: str) -> bool:
    """Return whether a test is there, by its file below the root and its name: `FILE::NAME`."""
    file, _, name = test.partition("::")
    return (root / file).is_file() and f"def {name}(" in (root / file).read_text(encoding="utf-8")
