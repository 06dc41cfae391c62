"""Which sequences are drawn at a time, and what of the device each of them holds: pages, and the row of its adapter.

Host objects, which only the sampler's thread touches. Slots are divided over the shards of a mesh.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tinsmith import TokenArray
from tinsmith_jax.pages import AdapterRows, Pages, PrefixKey
from tinsmith_jax.requests import Draw, DrawQueue, LoadedSnapshot, Request
from tinsmith_jax.sampling_values import BASE_MODEL, NO_STATE, PAGE, STOP_TABLE, Drawn, SamplerDevice, SlotInput
from tinsmith_jax.suspects import Suspects


class Prompt:
    """A request's prompt on one shard, which the request's samples there share.

    It exists as long as one of them has a slot. `pages` are its full ones, in order; then comes `rest`, if the prompt
    does not fill its last page. The samples copy it, as they go on in it.

    One snapshot's weights read all of it, so its pages can be found by others. Afterwards its samples may go on with
    newer weights. Their own pages then hold keys and values of both, which nobody finds.
    """

    def __init__(self, request: Request, shard: int, adapter: int) -> None:
        self.request = request
        self.shard = shard
        self.snapshot = request.snapshot  # that reads it, and that its samples then draw from
        self.adapter = adapter  # the row of its adapter on the shard
        self.pages: list[int] = []
        self.rest: int | None = None
        self.num_cached = 0  # tokens of pages that had been read before
        self.num_users = 0
        self.state = NO_STATE  # the row of recurrent states that says where it has been read to
        self.own_state = 0  # the row that is its own
        self.kept: list[int] = []  # rows of kept states that it uses: to go on from, or to write
        self.keeps_at: frozenset[int] = frozenset()  # the numbers of pages after which others may go on
        self._key = PrefixKey.first(self.serial, request.op.sampling_session_id)
        request.read_with(self.serial)

    @property
    def serial(self) -> int:
        """Return the serial of the adapter, 0 for the base model."""
        return 0 if self.snapshot is None else self.snapshot.serial

    @property
    def is_behind(self) -> bool:
        """Return whether it has been read, and there is a newer snapshot for its samples."""
        return self.ready and self.snapshot is not self.request.snapshot

    def scores_tile(self, first: int, last: int) -> bool:
        """Return whether these positions are still to be scored when they are read."""
        return self.request.scores_tile(first, last, self.serial)

    @property
    def num_read(self) -> int:
        return self.request.num_prefill if self.rest is not None else len(self.pages) * PAGE

    @property
    def ready(self) -> bool:
        return self.num_read == self.request.num_prefill

    @property
    def next_key(self) -> PrefixKey | None:
        """Return the key of the next page, None if the prompt does not fill it."""
        tokens = self.next_tokens
        return self._key.then(tokens) if len(tokens) == PAGE else None

    @property
    def next_tokens(self) -> TokenArray:
        end = min(self.num_read + PAGE, self.request.num_prefill)
        return self.request.op.prompt_P[self.num_read : end]

    def add(self, page: int) -> None:
        """Add the next page."""
        key = self.next_key
        if key is None:
            self.rest = page
        else:
            self.pages.append(page)
            self._key = key

    @property
    def all_pages(self) -> list[int]:
        return self.pages if self.rest is None else [*self.pages, self.rest]

    def full_keys(self) -> Iterator[PrefixKey]:
        """Yield the keys of the pages that the prompt fills and that need not be scored, from the next one on."""
        key, page = self._key, len(self.pages)
        while (end := (page + 1) * PAGE) <= self.request.num_prefill and not self.scores_tile(end - PAGE, end):
            key, page = key.then(self.request.op.prompt_P[end - PAGE : end]), page + 1
            yield key

    def release(self, pages: Pages, states: Pages) -> None:
        for page in self.all_pages:
            pages.release(page)
        self.state = NO_STATE
        self.release_states(states)

    def release_states(self, states: Pages) -> None:
        """Give up the kept states behind which it has been read."""
        for row in self.kept:
            if row != self.state:
                states.release(row)
        self.kept = [row for row in self.kept if row == self.state]


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """The place of a sequence among those that are sampled at a time."""

    index: int
    shard: int = 0  # of the device's mesh
    draw: Draw | None = None
    prompt: Prompt | None = None
    own: list[int] | None = None  # pages after the prompt's full ones; None until it has begun
    states: tuple[int, int] = (0, 0)  # rows of recurrent states: of the last dispatch, and for the next one
    decoded: bool = False  # the first of them holds something

    @property
    def request(self) -> Request:
        assert self.draw is not None, "the slot is occupied"
        return self.draw.request

    @property
    def ready(self) -> bool:
        """Return whether the slot can decode."""
        return self.draw is not None and self.draw.stop_reason is None and self.own is not None

    def take(self, drawn: Drawn, row: int) -> None:
        """Take over what a dispatch has drawn in a row."""
        assert self.draw is not None, "a running slot is occupied"
        assert self.prompt is not None, "a running slot is occupied"
        self.draw.take(drawn, row, None if self.prompt.snapshot is None else self.prompt.snapshot.snapshot_id)
        self.states, self.decoded = self.states[::-1], True

    @property
    def table(self) -> list[int]:
        assert self.prompt is not None, "the slot is occupied"
        assert self.own is not None, "the sequence has begun"
        return [*self.prompt.pages, *self.own]

    def reserve(self, num_tokens: int, pages: Pages) -> None:
        """Allocate pages for the next `num_tokens`, at most to the sequence's end."""
        assert self.draw is not None, "the slot is occupied"
        assert self.prompt is not None, "the slot is occupied"
        assert self.own is not None, "the sequence has begun"
        end = min(self.draw.position + num_tokens, self.draw.request.num_kept)
        while (len(self.prompt.pages) + len(self.own)) * PAGE < end:
            self.own.append(pages.take())

    def describe(self, given: SlotInput, row: int) -> None:
        """Fill in a row: where the sequence is, and its sampling parameters."""
        draw, prompt, table = self.draw, self.prompt, self.table
        assert draw is not None, "a running slot is occupied"
        assert prompt is not None, "a running slot is occupied"
        op, params = draw.request.op, draw.request.op.params
        given.tokens[row] = draw.tokens[-1] if draw.tokens else op.prompt_P[-1]
        given.positions[row] = draw.position
        given.left[row] = params.max_tokens - len(draw.tokens)
        stop = sorted(draw.request.stop_tokens)[:STOP_TABLE]
        given.stop_tokens[row, : len(stop)] = stop
        given.tables[row, : len(table)] = table
        given.adapters[row] = prompt.adapter
        given.states[row] = self.states[0] if self.decoded else prompt.state, self.states[1]
        given.seed_words[row] = (params.seed >> 32, params.seed & 0xFFFFFFFF)
        given.sample_index[row] = draw.index
        given.temperature[row] = params.temperature
        given.top_k[row] = params.top_k
        given.top_p[row] = params.top_p
        given.any_top = given.any_top or op.topk_sample_logprobs > 0


class Slots:
    """Gives sequences their slots, and takes these back with all that they hold."""

    def __init__(self, device: SamplerDevice, suspects: Suspects) -> None:
        self._device, self._suspects = device, suspects
        shape = self._shape = device.shape
        self._slots = [
            Slot(index=index, shard=shape.shard_of(index), states=shape.states_of(index))
            for index in range(shape.num_slots)
        ]
        self.clear()

    def clear(self) -> None:
        """Empty all slots, and hold nothing: the device's state is new, or lost."""
        shape, shards = self._shape, range(self._shape.num_shards)
        for slot in self._slots:
            slot.draw, slot.prompt, slot.own = None, None, None
        self._prompts: dict[tuple[Request, int], Prompt] = {}  # by shard, in the order in which they are read
        self.pages = [Pages(shape.pages_per_shard, kept=shape.kept_pages) for _ in shards]
        self.states = [Pages(shape.states_per_shard, first=shape.first_kept_state) for _ in shards]  # kept ones
        self._rows = [AdapterRows(shape.whole_per_shard, grows=shape.grows) for _ in shards]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def draws(self) -> list[Draw]:
        """The sequences that have a slot."""
        return [slot.draw for slot in self._slots if slot.draw is not None]

    @property
    def prompts(self) -> Iterable[Prompt]:
        """The prompts of these, in the order in which they are read."""
        return self._prompts.values()

    def of(self, request: Request) -> list[Slot]:
        return [slot for slot in self._slots if slot.draw is not None and slot.draw.request is request]

    def fill(self, queue: DrawQueue) -> None:
        """Assign free slots to waiting sequences, in order, as long as the next one has room."""
        free = [slot for slot in self._slots if slot.draw is None]
        while free and (draw := queue.first(self.draws)) is not None:
            self._suspects.involved = (draw.request,)
            shards = {shard for shard in {slot.shard for slot in free} if self._has_room(shard, draw.request)}
            suitable = [slot for slot in free if slot.shard in shards]
            if not suitable:
                break
            queue.remove(draw)
            slot = self._choose(suitable, draw.request)
            free.remove(slot)
            slot.draw = draw
            slot.prompt = self._prompt(draw.request, slot.shard)
            slot.prompt.num_users += 1
            slot.decoded = False

    def leave(self, slot: Slot) -> None:
        """Empty a slot. The last one that uses a prompt gives it up."""
        prompt, slot.draw, slot.prompt = slot.prompt, None, None
        self.give_up_own(slot)
        if prompt is None:
            return
        prompt.num_users -= 1
        if not prompt.num_users:
            del self._prompts[prompt.request, prompt.shard]
            prompt.release(self.pages[slot.shard], self.states[slot.shard])
            if prompt.snapshot is not None:
                self._rows[slot.shard].release(prompt.serial)

    def give_up_own(self, slot: Slot) -> None:
        for page in slot.own or ():
            self.pages[slot.shard].release(page)
        slot.own = None

    def catch_up(self) -> None:
        """Let sequences go on with the newest snapshots of their requests, from the next dispatch on."""
        for prompt in self.prompts:
            if prompt.is_behind:
                self._suspects.involved = (prompt.request,)
                self._catch_up(prompt)

    def _catch_up(self, prompt: Prompt) -> None:
        """Write the newer adapter over the former one, if nobody else needs that, else to another row.

        If there is no other row, the sequences wait, at most until the prompts that need the former one are read.
        """
        rows, newer = self._rows[prompt.shard], prompt.request.snapshot
        assert newer is not None, "the base model does not change"
        sharing = [each for each in self.prompts if each.shard == prompt.shard and each.serial == prompt.serial]
        if not rows.holds(newer.serial) and all(p.is_behind and p.request.snapshot is newer for p in sharing):
            self._write(prompt.adapter, prompt.shard, newer)
            rows.rename(prompt.serial, newer.serial)
            for each in sharing:
                each.snapshot = newer
        elif rows.has_room(newer.serial):
            former, prompt.adapter = prompt.serial, self._adapter_row(newer, prompt.shard)
            prompt.snapshot = newer
            rows.release(former)

    def in_rows(self, running: Sequence[Slot]) -> dict[int, Slot]:
        """Give each slot a row of a dispatch, the first ones of its shard."""
        next_row = [shard * self._shape.slots_per_shard for shard in range(self._shape.num_shards)]
        rows = {}
        for slot in running:
            rows[next_row[slot.shard]] = slot
            next_row[slot.shard] += 1
        return rows

    def forget(self, serial: int) -> None:
        """Let nobody find what was read with an adapter that is gone."""
        for pages, states, rows in zip(self.pages, self.states, self._rows, strict=True):
            pages.forget(serial)
            states.forget(serial)
            rows.forget(serial)

    def forget_unused(self) -> tuple[list[list[int]], list[list[int]]]:
        """Forget prefixes and adapters that nobody uses. Return each shard's pages and rows in which they may lie."""
        for states in self.states:
            states.give_back()
        return [pages.give_back() for pages in self.pages], [rows.give_back() for rows in self._rows]

    def _has_room(self, shard: int, request: Request) -> bool:
        """Return whether a shard has pages for one more sequence of a request, whatever it draws, and its adapter."""
        running = [slot.draw.request for slot in self._slots if slot.shard == shard and slot.draw is not None]
        pages = sum(self._shape.pages_at_most(each.num_kept) for each in (*running, request))
        has_row = request.snapshot is None or self._rows[shard].has_room(request.snapshot.serial)
        return has_row and pages < self._shape.pages_per_shard

    def _choose(self, free: list[Slot], request: Request) -> Slot:
        """Prefer the shard on which the request's prompt is read already, then empty shards, then the first."""
        num_free = Counter(slot.shard for slot in free)
        return max(free, key=lambda slot: ((request, slot.shard) in self._prompts, num_free[slot.shard]))

    def _prompt(self, request: Request, shard: int) -> Prompt:
        known = self._prompts.get((request, shard))
        if known is None:
            known = Prompt(request, shard, self._adapter_row(request.snapshot, shard))
            taken = {prompt.own_state for prompt in self.prompts if prompt.shard == shard}
            known.own_state = next(row for row in range(1, self._shape.slots_per_shard + 1) if row not in taken)
            self._prompts[request, shard] = known
        return known

    def _adapter_row(self, snapshot: LoadedSnapshot | None, shard: int) -> int:
        """Return a row of the shard with a snapshot's adapter, written first if it is in none."""
        rows = self._rows[shard]
        if snapshot is None:
            return BASE_MODEL
        row = rows.find(snapshot.serial)
        if row is None:
            row = rows.take()
            try:
                self._write(row, shard, snapshot)
            except BaseException:
                rows.put_back(row)
                raise
            rows.name(row, snapshot.serial)
        return row

    def _write(self, row: int, shard: int, snapshot: LoadedSnapshot) -> None:
        row_on_all = shard * self._shape.adapters_per_shard + row
        self._device.write_adapter(row_on_all, snapshot.arrays, snapshot.scale)
