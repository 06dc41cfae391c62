"""The tokens of conversations, so that the next turn of one begins with the very tokens that were sampled.

Text that was sampled may be encoded into other tokens. So a model's words are kept here as tokens, with the
conversation that they continue, and a request that repeats both gets the tokens. Each tenant has its own share, which
others do not affect. If tokens are gone, the text is encoded.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

import numpy as np

from tinsmith import TokenArray
from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.tool_calls import parsed

_MOST_TENANTS: Final = 256
_TENANT_TOKENS: Final = 1 << 20

Digests = list[bytes]
"""Of a conversation: one for each message, of everything up to it."""


def digests(of_all: Json, messages: Iterable[Json]) -> Digests:
    """`of_all`: what else decides about the text, such as the model and the tools."""
    running, found = hashlib.sha256(), []
    for part in (of_all, *messages):
        running.update(hashlib.sha256(json.dumps(part, sort_keys=True).encode()).digest())
        found.append(running.digest())
    return found[1:]


def canonical_arguments(text: str) -> Json:
    """Return the one form of a call's arguments. Clients that read the JSON write it in another way, and 1.0 as 1."""
    found = parsed(text)
    return text if found is None else _with_whole_numbers(found)


def _with_whole_numbers(value: Json) -> Json:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_whole_numbers(each) for each in value]
        case dict():
            return {name: _with_whole_numbers(each) for name, each in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class _Turn:
    parent: bytes | None
    tokens: TokenArray  # after the parent's


@dataclass(slots=True)
class _Kept:
    turns: OrderedDict[bytes, _Turn] = field(default_factory=OrderedDict)  # used longest ago first
    num_tokens: int = 0


class Transcripts:
    def __init__(self, *, tenant_tokens: int = _TENANT_TOKENS) -> None:
        self._tenant_tokens = tenant_tokens
        self._tenants: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = Lock()  # long conversations are read in threads

    def tokens(self, tenant: str, digest: bytes) -> list[int] | None:
        """Return the tokens of a conversation up to a message; None if they are not kept."""
        with self._lock:
            chain = self._chain(tenant, digest)
        return np.concatenate([turn.tokens for turn in reversed(chain)]).tolist() if chain else None

    def _chain(self, tenant: str, digest: bytes) -> list[_Turn]:
        """Return a turn and those before it, the last one first; nothing if one of them is not kept."""
        kept = self._tenants.get(tenant)
        chain: list[_Turn] = []
        at: bytes | None = digest
        while kept is not None and at is not None:
            if (turn := kept.turns.get(at)) is None:
                return []
            kept.turns.move_to_end(at)  # the first turn last, so that no turn outlives its parent
            chain.append(turn)
            at = turn.parent
        return chain

    def has(self, tenant: str, digest: bytes) -> bool:
        """Return whether the last turn of a conversation is kept; `tokens` needs those before it as well."""
        return (kept := self._tenants.get(tenant)) is not None and digest in kept.turns

    def keep(self, tenant: str, digest: bytes, *, parent: bytes | None, tokens: Sequence[int]) -> None:
        """Keep the tokens of a conversation up to a message. `tokens` leaves out the parent's."""
        with self._lock:
            self._keep(tenant, digest, parent, tokens)

    def _keep(self, tenant: str, digest: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        kept = self._tenants.pop(tenant, None) or _Kept()
        self._tenants[tenant] = kept
        if len(self._tenants) > _MOST_TENANTS:
            self._tenants.popitem(last=False)
        if (before := kept.turns.pop(digest, None)) is not None:
            kept.num_tokens -= len(before.tokens)
        kept.turns[digest] = _Turn(parent, np.asarray(tokens, np.int32))
        kept.num_tokens += len(tokens)
        while parent is not None and parent in kept.turns:
            kept.turns.move_to_end(parent)
            parent = kept.turns[parent].parent
        while kept.num_tokens > self._tenant_tokens:
            _, oldest = kept.turns.popitem(last=False)
            kept.num_tokens -= len(oldest.tokens)
