"""Reads the prompts of sequences that have a slot into the cache, tile by tile, and scores them.

Tiles that an earlier prompt with the same beginning has read come from the cache. Layers with the gated delta rule can
go on only where the state was kept, too: after the last full page of each prompt, and where a prompt was seen to branch
off from another. A state is never copied: the tile before writes it to the kept row, and those after it read it there.
"""

from collections.abc import Sequence
from itertools import takewhile

from tinsmith import Array
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.pages import ExpertPages, Pages, PrefixKey
from tinsmith_jax.requests import DrawQueue, Request
from tinsmith_jax.sampling_values import PAGE, PageCopy, PromptTile, SamplerDevice
from tinsmith_jax.slots import Prompt, Slot, Slots
from tinsmith_jax.suspects import Suspects


class PromptReader:
    """Only the sampler's thread touches it."""

    def __init__(
        self, device: SamplerDevice, config: ModelConfig, slots: Slots, suspects: Suspects, *, tiles_per_round: int
    ) -> None:
        self._device, self._slots, self._suspects = device, slots, suspects
        self._tiles_per_round = tiles_per_round
        self._experts = ExpertPages(device.shape, config) if device.shape.returns_experts else None
        self.clear()

    def clear(self) -> None:
        """Forget a dispatch that did not end."""
        self._reading = False  # tiles count as read that are neither written nor scored yet
        self._unwritten: list[tuple[Pages, int]] = []  # pages and states that others find though they are not written

    def read(self) -> None:
        """Read prompts, one after the other, up to the budget of a round, so that decoding continues meanwhile."""
        left = self._tiles_per_round
        unread = (prompt.request for prompt in self._slots.prompts if not prompt.ready)
        for together in self._suspects.groups(unread):
            while left > 0:
                self._suspects.involved, self._reading = together, True
                work = self._next_tiles(together, min(left, self._device.shape.prefill_tiles[-1]))
                longest = max(map(len, work))
                if longest:
                    self._read_tiles([one for shard in work for one in shard])
                self._reading = False
                if not longest:
                    break
                left -= longest
        self._begin_sequences()

    def take_back(self, queue: DrawQueue) -> None:
        """If tiles were being read when a step failed: take back their pages, and all sequences that may know them."""
        if not self._reading:
            return
        self._reading = False
        for slot in reversed(list(self._slots)):
            if slot.draw is not None and slot.own is None:
                queue.put_back(slot.draw)
                self._slots.leave(slot)
        for pages, page in self._unwritten:
            pages.unname(page)
        self._unwritten.clear()

    def experts_of(self, prompt: Prompt) -> Array | None:
        """Return the experts of a prompt's tokens read so far, [tokens, L, C]. None: the sampler returns none."""
        if self._experts is None:
            return None
        return self._experts.of(prompt.shard, prompt.all_pages, prompt.num_read)

    def _next_tiles(self, requests: Sequence[Request], most: int) -> list[list[tuple[Prompt, PromptTile]]]:
        """Return each shard's next tiles; one prompt's tiles come in order."""
        work: list[list[tuple[Prompt, PromptTile]]] = [[] for _ in self._slots.pages]
        wanted = set(requests)
        for prompt in self._slots.prompts:
            own = work[prompt.shard]
            while prompt.request in wanted and len(own) < most and (tile := self._next_tile(prompt)) is not None:
                own.append((prompt, tile))
        return work

    def _next_tile(self, prompt: Prompt) -> PromptTile | None:
        """Take what is in the cache already, up to a tile that must be read: return it. It counts as read from here on.

        So another prompt with this prefix has it as well. In one dispatch all tiles are written before they are read.
        """
        pages, recurrent = self._slots.pages[prompt.shard], self._device.shape.recurrent
        if recurrent and not prompt.num_read:
            self._go_on_from_kept(prompt)
        while not prompt.ready:
            start, tokens, key = prompt.num_read, prompt.next_tokens, prompt.next_key
            is_read = recurrent or prompt.scores_tile(start, start + len(tokens))
            page = None if key is None or is_read else pages.find(key)
            if page is not None:
                prompt.add(page)
                prompt.num_cached += len(tokens)
                continue
            page = pages.take()
            if key is not None and pages.name(page, key):
                self._unwritten.append((pages, page))
            before, state = tuple(prompt.pages), prompt.state
            prompt.add(page)
            prompt.state = prompt.own_state if key is None else self._state_after(prompt, key)
            return PromptTile(
                shard=prompt.shard,
                start=start,
                tokens=tokens,
                pages=(*before, page),
                adapter=prompt.adapter,
                states=(state, prompt.state),
            )
        return None

    def _go_on_from_kept(self, prompt: Prompt) -> None:
        """Take the longest beginning of a prompt whose pages and state are there; note where to keep other states."""
        pages, states = self._slots.pages[prompt.shard], self._slots.states[prompt.shard]
        known = [*takewhile(pages.knows, prompt.full_keys())]
        number = next((n for n in range(len(known), 0, -1) if states.knows(known[n - 1])), 0)
        for key in known[:number]:
            page = pages.find(key)
            assert page is not None, "it is known"
            prompt.add(page)
            prompt.num_cached += PAGE
        if number:
            state = states.find(known[number - 1])
            assert state is not None, "it is known"
            prompt.kept.append(state)
            prompt.state = state
        prompt.keeps_at = frozenset((len(known), prompt.request.num_prefill // PAGE))

    def _state_after(self, prompt: Prompt, key: PrefixKey) -> int:
        """Return the row for the state after the prompt's last page: a kept one, if others may go on there."""
        states = self._slots.states[prompt.shard]
        if len(prompt.pages) not in prompt.keeps_at or states.knows(key) or not states.has_room:
            return prompt.own_state
        state = states.take()
        states.name(state, key)
        self._unwritten.append((states, state))
        prompt.kept.append(state)
        return state

    def _read_tiles(self, work: list[tuple[Prompt, PromptTile]]) -> None:
        experts = self._device.prefill([tile for _, tile in work])
        self._unwritten.clear()
        for prompt in {prompt for prompt, _ in work}:
            prompt.release_states(self._slots.states[prompt.shard])
        if self._experts is not None and experts is not None:
            self._experts.write(experts)
        for prompt, tile in work:
            request, end = prompt.request, tile.start + len(tile.tokens)
            if prompt.scores_tile(tile.start, end):
                self._suspects.involved = (request,)
                scores = request.scores
                targets, draws = scores.targets[tile.start : end], scores.draws(tile.start, end)
                scores.fill(tile.start, self._device.score(tile, targets, want_top=scores.wants_top, draws=draws))
            if prompt.serial == request.scored_by:
                request.scored_tokens = max(request.scored_tokens, end)

    def _begin_sequences(self) -> None:
        """Give each sequence whose prompt is read a copy of the prompt's last page, which it goes on to fill."""
        copying = []
        for slot in self._slots:
            prompt = slot.prompt
            if prompt is None or slot.own is not None or not prompt.ready:
                continue
            if slot.draw is not None and slot.draw.index == 0:
                prompt.request.cached_tokens = prompt.num_cached
            if prompt.rest is None:
                slot.own = []
            elif prompt.request.op.num_samples == 1:
                slot.own = [self._slots.pages[slot.shard].share(prompt.rest)]
            else:
                copying.append(slot)
        for together in self._suspects.groups(slot.request for slot in copying):
            self._suspects.involved = together
            self._copy_rest([slot for slot in copying if slot.request in set(together)])

    def _copy_rest(self, slots: Sequence[Slot]) -> None:
        copies = []
        for slot in slots:
            assert slot.prompt is not None, "the slot is occupied"
            assert slot.prompt.rest is not None, "there is a page to copy"
            slot.own = [self._slots.pages[slot.shard].take()]
            copies.append(PageCopy(shard=slot.shard, source=slot.prompt.rest, target=slot.own[0]))
        try:
            self._device.copy_pages(copies)
        except BaseException:
            for slot in slots:
                self._slots.give_up_own(slot)
            raise
