"""Text files of the product are UTF-8, whatever the locale: each place says so."""

import ast
from collections.abc import Iterator
from pathlib import Path

from syntax_trees import tree_of

ROOT = Path(__file__).parents[2]
WHOLE = {"read_text", "write_text"}
OPENING = {"open", "fdopen"}


def unsaid(file: Path) -> Iterator[int]:
    """Yield the lines that read or write text in the locale's encoding."""
    text = file.read_text(encoding="utf-8")
    if not any(word in text for word in (*WHOLE, *OPENING)):
        return
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, ast.Call) or any(each.arg == "encoding" for each in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        is_text = any(set(mode) <= set("rwax+t") and mode for mode in modes)
        if name in WHOLE or (name in OPENING and is_text):
            yield node.lineno


def test_every_text_file_has_a_named_encoding() -> None:
    places = ("core/tinsmith", "libraries/*/tinsmith_*", "plugins/*/tinsmith_*", "tools/*/tinsmith_*", "examples")
    files = [file for place in places for each in ROOT.glob(place) for file in each.rglob("*.py")]
    assert [f"{file.relative_to(ROOT)}:{line}" for file in files for line in unsaid(file)] == []
