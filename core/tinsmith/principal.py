"""Who sent a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """`tenant` owns what the request makes; one tenant never sees another's."""

    tenant: str
    name: str = ""  # shown to people
    admin: bool = False
