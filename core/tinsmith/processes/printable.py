"""Text from outside, on a terminal: names of files and tensors, metadata, what plugins and tenants say."""

from typing import Final

from rich import markup
from rich.console import Console

_UNBOUNDED: Final = 10_000  # columns


def console(*, stderr: bool = False) -> Console:
    """Return a console for people. It wraps lines on terminals only: files and pipes get each line whole."""
    made = Console(stderr=stderr, emoji=False, highlight=False)  # ids contain :train:, which would be an emoji
    if not made.is_terminal:
        made.width = _UNBOUNDED
    return made


def printable(text: str) -> str:
    """Replace what a terminal would obey, such as escape sequences, by its number."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in text
    )


def printable_lines(text: str) -> str:
    """Make text printable, and keep its lines."""
    return "\n".join(map(printable, text.split("\n")))


def escape(text: str) -> str:
    """Make text printable, and free of rich's markup."""
    return markup.escape(printable(text))


def escape_lines(text: str) -> str:
    """Make text printable and free of rich's markup, and keep its lines."""
    return markup.escape(printable_lines(text))
