"""The refusal of bodies in a form that is not read here."""

from typing import ClassVar

from tinsmith.errors import UnsupportedError


class MediaTypeError(UnsupportedError):
    """A body comes in a form, or packed in a way, that is not read here."""

    http_status: ClassVar[int] = 415

    def __init__(self, message: str, *, offered: str, header: str = "accept") -> None:
        """`header` of the answer names what is offered."""
        super().__init__(message)
        self.offered = offered
        self.header = header
