"""Text from outside, on a terminal: names of files and tensors, metadata, what plugins and tenants say."""

from rich import markup


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
