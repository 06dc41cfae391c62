"""Text from outside on a terminal: ids contain `:train:`, which rich makes an emoji, and names may contain markup."""

import ast
from collections.abc import Iterator
from pathlib import Path

from syntax_trees import tree_of

ROOT = Path(__file__).parents[2]
NEEDS = {"Console": "emoji", "from_markup": "emoji", "TextColumn": "markup"}
"""What must be switched off, by name, in each call."""
RENDERS = {"status", "Status", "Spinner"}
"""Their text is read as markup with emoji whatever the console does: give them a Text, or words of ours."""


def faults(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if "rich" not in text and "Console" not in text:
        return
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        off = {each.arg for each in node.keywords if isinstance(each.value, ast.Constant) and each.value.value is False}
        if called in NEEDS and NEEDS[called] not in off:
            yield f"{file.relative_to(ROOT)}:{node.lineno}: {called} without {NEEDS[called]}=False"
        if called in RENDERS and node.args and not isinstance(node.args[0], ast.Constant):
            yield f"{file.relative_to(ROOT)}:{node.lineno}: {called} with text that may be from outside"


def test_no_text_from_outside_becomes_markup_or_emoji() -> None:
    places = ("core/tinsmith", "libraries/*/tinsmith_*", "plugins/*/tinsmith_*", "tools/*/tinsmith_*", "examples")
    files = [file for place in places for each in ROOT.glob(place) for file in each.rglob("*.py")]
    assert [fault for file in files for fault in faults(file)] == []
