"""The names that plugin authors import: complete, sorted, and nothing else."""

import ast
from pathlib import Path
from types import ModuleType

import tinsmith
import tinsmith.testing


def imported_names(module: ModuleType) -> set[str]:
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    return {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_what_is_imported_is_what_is_exported() -> None:
    for module in (tinsmith, tinsmith.testing):
        assert set(module.__all__) == imported_names(module)


def test_exports_are_sorted_and_there() -> None:
    for module in (tinsmith, tinsmith.testing):
        assert module.__all__ == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_the_package_is_typed() -> None:
    assert tinsmith.__file__ is not None
    assert (Path(tinsmith.__file__).parent / "py.typed").is_file()
