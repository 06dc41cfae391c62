"""The files that a reader of a tutorial has in the end."""

import re
from functools import cache
from pathlib import Path

from tinsmith.machine import Scratch

_PAGES = Path(__file__).parents[2] / "docs" / "tutorial"
_BLOCK = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def files_of(page: str) -> dict[str, str]:
    """Return the text of each file, whose pieces are divided over the page."""
    files: dict[str, list[str]] = {}
    for name, piece in _BLOCK.findall((_PAGES / f"{page}.md").read_text()):
        files.setdefault(name, []).append(piece)
    return {name: "\n".join(pieces) for name, pieces in files.items()}


@cache
def written(page: str) -> Path:
    """Write the files to a folder, which lasts as long as this process."""
    folder = _scratch(page).path
    for name, text in files_of(page).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@cache
def _scratch(page: str) -> Scratch:
    return Scratch(f"tinsmith-{page}-")
