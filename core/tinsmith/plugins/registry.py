"""The offers of plugins, by name: one registry per kind of spec, with the plugin of each offer."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tinsmith.errors import PluginError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PluginOrigin:
    """Where a plugin comes from: the entry point's name, and the distribution that declares it.

    One per plugin, compared by identity: two plugins may share name and distribution.
    """

    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginReport(PluginOrigin):
    """One row of `tinsmith plugins`."""

    offers: tuple[str, ...] = ()  # "backend jax", and the other hooks it implements by their short names
    error: str | None = None  # why it is broken, or which of its offers collide with another plugin's


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One thing that a plugin offers."""

    kind: str  # "backend"; as messages say it
    spec: Any


class Named(Protocol):
    """The attributes common to all specs."""

    @property
    def name(self) -> str: ...


S = TypeVar("S", bound=Named)


class Registry(Generic[S]):
    """The offers of one kind, in the order in which the plugins were loaded."""

    def __init__(self, kind: str, hint: Callable[[str, str], str]) -> None:
        """`hint(name, similar)` ends the message about a missing `name`; `similar` suggests a close one, if any."""
        self.kind = kind  # "backend"; as messages say it
        self._hint = hint
        self._offers: dict[str, list[tuple[S, PluginOrigin]]] = {}

    def add(self, specs: Iterable[S], origin: PluginOrigin) -> None:
        for spec in specs:
            self._offers.setdefault(spec.name, []).append((spec, origin))

    def unambiguous(self) -> dict[str, S]:
        """Return the offers whose name only one plugin uses, sorted by name."""
        return {name: offers[0][0] for name, offers in sorted(self._offers.items()) if len(offers) == 1}

    def names_of(self, origin: PluginOrigin) -> tuple[str, ...]:
        return tuple(name for name, offers in self._offers.items() if any(who is origin for _, who in offers))

    def of(self, origin: PluginOrigin) -> list[Offer]:
        all_offers = (each for offers in self._offers.values() for each in offers)
        return [Offer(kind=self.kind, spec=spec) for spec, who in all_offers if who is origin]

    def names_beside(self, distribution: str) -> list[str]:
        """Return the unambiguous names that other distributions offer, sorted."""
        return [name for name in self.unambiguous() if self._offers[name][0][1].distribution != distribution]

    def all(self) -> dict[str, S]:
        """Return every offer by name. Raise PluginError if a name is offered twice: it could mean either."""
        for name, offers in sorted(self._offers.items()):
            if len(offers) > 1:
                raise PluginError(self._conflict(name))
        return self.unambiguous()

    def conflicts_of(self, origin: PluginOrigin) -> list[str]:
        """Return a message for every name that this plugin offers and another one does, too."""
        return [self._conflict(name) for name in sorted(self.names_of(origin)) if len(self._offers[name]) > 1]

    def get(self, name: str) -> S:
        """Raise PluginError if no plugin, or more than one, offers `name`."""
        offers = self._offers.get(name, [])
        if len(offers) == 1:
            return offers[0][0]
        if offers:
            raise PluginError(self._conflict(name))
        installed = ", ".join(sorted(self._offers)) or "none"
        hint = self._hint(name, suggestion(name, self._offers))
        msg = f"no {self.kind} named {name!r}, installed: {installed}{hint}"
        raise PluginError(msg)

    def _conflict(self, name: str) -> str:
        who = " and ".join(f"{origin} (plugin {origin.name!r})" for _, origin in self._offers[name])
        return f"{self.kind} {name!r} is offered by {who}; uninstall all but one of them"


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" if something known is close, else nothing."""
    close = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
