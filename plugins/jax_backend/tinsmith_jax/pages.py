"""Which page of the cache holds what, on the host: pages in use, prefixes of prompts that stay, and free pages.

Kept states of layers with the gated delta rule are found and forgotten like pages: each is the state after a prefix.

A page that holds 64 tokens of a prompt is known by its key: the adapter, the sampling session, and a hash of all tokens
up to its end. So the time of an answer reveals nothing about others' requests. The page stays when nobody
uses it any more, until its place is needed; the one that went unused longest goes first. Only prompts are shared:
reading them again would give the same bits. Drawn tokens were computed in another shape.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from tinsmith import Array, TokenArray
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.sampling_values import PAGE, ExpertsOfPages, SamplingShape, expert_dtype, experts_of_token


class PrefixKey(NamedTuple):
    serial: int  # of the adapter; 0 = the base model
    digest: bytes  # of the session and the tokens

    @classmethod
    def first(cls, serial: int, sampling_session_id: str) -> "PrefixKey":
        return cls(serial, sampling_session_id.encode())

    def then(self, tokens: TokenArray) -> "PrefixKey":
        """Return the key of the prefix extended by these tokens."""
        return PrefixKey(self.serial, blake2b(self.digest + tokens.tobytes(), digest_size=16).digest())


class Pages:
    """The pages of one shard. Those before `first` are not given out."""

    def __init__(self, num_pages: int, *, first: int = 1, kept: int | None = None) -> None:
        """`kept`: how many pages that nobody uses may stay for the prefixes they hold; None: all."""
        self._kept = num_pages if kept is None else kept
        self._free = list(range(first, num_pages))  # a heap: what is in use lies close together
        self._touched: set[int] = set()  # that have been given out since `give_back`
        self._users: dict[int, int] = {}
        self._keys: dict[int, PrefixKey] = {}
        self._known: dict[PrefixKey, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # that are known, the longest unused one first

    @property
    def num_used(self) -> int:
        return len(self._users)

    @property
    def num_known(self) -> int:
        return len(self._known)

    @property
    def has_room(self) -> bool:
        """Return whether a page can be taken. Of the cache's, always: the sampler never uses more than a shard has."""
        return bool(self._free or self._unused)

    def take(self) -> int:
        """Return a page for new content. There must be room."""
        page = heapq.heappop(self._free) if self._free else self._evict()
        self._users[page] = 1
        self._touched.add(page)
        return page

    def give_back(self) -> list[int]:
        """Forget the prefixes that nobody uses. Return the free pages in which something may lie, in order."""
        self._evict_to(0)
        given = sorted(self._touched.intersection(self._free))
        self._touched.difference_update(given)
        return given

    def knows(self, key: PrefixKey) -> bool:
        return key in self._known

    def find(self, key: PrefixKey) -> int | None:
        """Return the page with this prefix, for one more user, or None."""
        page = self._known.get(key)
        if page is not None:
            self._unused.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
        return page

    def share(self, page: int) -> int:
        """Count one more user of a page in use."""
        self._users[page] += 1
        return page

    def name(self, page: int, key: PrefixKey) -> bool:
        """Let others find a page that is in use. Of two with the same content, they find the first.

        Return whether it is this one.
        """
        if key in self._known:
            return False
        self._known[key], self._keys[page] = page, key
        return True

    def unname(self, page: int) -> None:
        """Let nobody find a page any more."""
        del self._known[self._keys.pop(page)]
        if page in self._unused:
            del self._unused[page]
            heapq.heappush(self._free, page)

    def release(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page]:
            return
        del self._users[page]
        if page in self._keys:
            self._unused[page] = None
            self._evict_to(self._kept)
        else:
            heapq.heappush(self._free, page)

    def forget(self, serial: int) -> None:
        """Free what was read with an adapter that is gone; pages in use are freed with their last user."""
        for key in [key for key in self._known if key.serial == serial]:
            page = self._known.pop(key)
            del self._keys[page]
            if page in self._unused:
                del self._unused[page]
                heapq.heappush(self._free, page)

    def _evict_to(self, number: int) -> None:
        """Free those pages whose prefixes went unused longest."""
        while len(self._unused) > number:
            heapq.heappush(self._free, self._evict())

    def _evict(self) -> int:
        page, _ = self._unused.popitem(last=False)
        del self._known[self._keys.pop(page)]
        return page


class AdapterRows:
    """Which adapter each row of a shard holds, by serial. Unused rows keep theirs until the place is needed.

    If a row takes memory only once it has been written, adapters in use come to have as many as there are of them at a
    time: what nobody uses makes room before another row is written.
    """

    def __init__(self, num_rows: int, *, grows: bool = False) -> None:
        self._free = set(range(num_rows))
        self._touched = set() if grows else set(range(num_rows))  # that take memory
        self._rows: OrderedDict[int, int] = OrderedDict()  # by serial, the one that was wanted last at the end
        self._users: dict[int, int] = {}

    def has_room(self, serial: int) -> bool:
        """Return whether an adapter is in a row, or there is one that it may take."""
        return serial in self._rows or bool(self._free) or not all(map(self._users.get, self._rows))

    def holds(self, serial: int) -> bool:
        return serial in self._rows

    def find(self, serial: int) -> int | None:
        """Return the row with this adapter, for one more user, or None."""
        if serial not in self._rows:
            return None
        self._rows.move_to_end(serial)
        self._users[serial] = self._users.get(serial, 0) + 1
        return self._rows[serial]

    def take(self) -> int:
        """Return a row that may be overwritten. There is one as long as fewer adapters are in use than rows."""
        unused = next((serial for serial in self._rows if not self._users.get(serial)), None)
        ready = self._free & self._touched
        if unused is not None and not ready:
            return self._rows.pop(unused)
        row = min(ready or self._free)
        self._free.remove(row)
        self._touched.add(row)
        return row

    def put_back(self, row: int) -> None:
        """Return a row that was taken and holds nothing now."""
        self._free.add(row)

    def name(self, row: int, serial: int) -> None:
        """Note the adapter that has been written to a row. The row then has one user."""
        self._rows[serial], self._users[serial] = row, 1

    def rename(self, serial: int, newer: int) -> None:
        """Note that another adapter has been written over one. Its users are now of that one."""
        self._rows[newer], self._users[newer] = self._rows.pop(serial), self._users.pop(serial)

    def release(self, serial: int) -> None:
        self._users[serial] -= 1

    def forget(self, serial: int) -> None:
        """Free the row of an adapter that is gone and that nobody uses."""
        if serial in self._rows and not self._users.get(serial):
            self._free.add(self._rows.pop(serial))

    def give_back(self) -> list[int]:
        """Forget the adapters that nobody uses. Return the free rows in which something may lie, in order."""
        for serial in list(self._rows):
            self.forget(serial)
        given = sorted(self._free & self._touched)
        self._touched.difference_update(given)
        return given


class ExpertPages:
    """Which experts computed the tokens that pages hold of prompts: a prompt that finds a prefix has its experts, too.

    S = shards, P = pages of a shard, T = tokens of a page, L = layers, C = experts of a token in a layer.
    """

    def __init__(self, shape: SamplingShape, config: ModelConfig) -> None:
        pages = (shape.num_shards, shape.pages_per_shard, PAGE)
        self._experts_SPTLC = np.zeros((*pages, *experts_of_token(config)), expert_dtype(config))

    def write(self, experts: ExpertsOfPages) -> None:
        for page, experts_TLC in experts.items():
            self._experts_SPTLC[page] = experts_TLC

    def of(self, shard: int, pages: Sequence[int], num_tokens: int) -> Array:
        """Return a copy of the experts of the first tokens that a shard's pages hold, [tokens, L, C]."""
        experts_TLC = self._experts_SPTLC[shard, pages]
        return experts_TLC.reshape(-1, *experts_TLC.shape[2:])[:num_tokens]
