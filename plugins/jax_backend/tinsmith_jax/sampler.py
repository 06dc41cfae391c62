"""Continuous sampling: requests join the running batch at the next dispatch and leave it with their last token.

The async side (one event loop) only queues requests and waits for them. One thread owns the slots and the device. In
each round, it drops cancelled requests, fills free slots from the queue, reads some prompt tiles, decodes a few steps
and returns finished sequences.

Requests share these steps. If one fails, all go back to where they were before it, and those who were in it are tried
one by one: the one that fails alone is refused, and the others get the bits that they would have had.
"""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tinsmith import (
    Capabilities,
    Failed,
    Sample,
    SampleOutput,
    SamplingBackend,
    Snapshot,
    StopRules,
    UnsupportedError,
    UserError,
    diverged,
    log_privately,
    unless_diverged,
)
from tinsmith.workers import WorkerDiedError
from tinsmith_jax import adapters
from tinsmith_jax.expert_pages import ExpertPages
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.pages import Pages, Rows
from tinsmith_jax.rank_classes import class_of
from tinsmith_jax.remote import RemoteSampling, RemoteSnapshot
from tinsmith_jax.sampling_device import SamplingDevice
from tinsmith_jax.sampling_values import BASE_MODEL, STOP_TABLE, Drawn, PageCopy, PromptTile, SlotInput
from tinsmith_jax.slots import Line, LoadedSnapshot, Prompt, Request, Slot
from tinsmith_jax.suspects import Suspects
from tinsmith_jax.tiles import TILE

logger = logging.getLogger(__name__)

CLOSED = "the sampler is closing; send the request again once the engine is back"


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A request and the future that waits for it."""

    request: Request
    future: asyncio.Future[SampleOutput | Failed]
    loop: asyncio.AbstractEventLoop

    def answer(self, result: SampleOutput | Failed) -> None:
        self._settle(lambda: self.future.set_result(result))

    def fail(self, error: Exception) -> None:
        if isinstance(error, StopIteration):  # which a future cannot hold
            error = RuntimeError(f"StopIteration: {error}")
        self._settle(lambda: self.future.set_exception(error))

    def _settle(self, settle: Callable[[], None]) -> None:
        """Called from the sampler's thread. The loop may already be closed when the process ends."""

        def put() -> None:
            if not self.future.done():
                settle()

        try:
            self.loop.call_soon_threadsafe(put)
        except RuntimeError:
            logger.debug("the event loop closed before a sample's answer")


@dataclass(slots=True, kw_only=True)
class _Users:
    """The running samples of a snapshot. `idle` is set while there are none."""

    snapshot: LoadedSnapshot
    count: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Sampler(SamplingBackend):
    """Samples on a device that it may share with training, taking turns."""

    def __init__(
        self,
        device: SamplingDevice | RemoteSampling,
        config: ModelConfig,
        *,
        capabilities: Capabilities,
        rules: StopRules,
        prefill_tokens: int | None,
        idle_s: float = 60.0,
    ) -> None:
        """`idle_s`: after so long without a request, nothing is kept for later ones."""
        self._device = device
        self._idle_s = idle_s
        self._capabilities = capabilities
        self._config = config
        self._rules = rules
        tokens = prefill_tokens or max(512, device.shape.prefill_tiles[-1] * TILE)
        self._prefill_tiles = max(1, tokens // TILE)
        self._snapshots: dict[str, _Users] = {}  # touched on the event loop only
        self._serials = 0
        # Shared by the loop and the thread, guarded by `_wake`:
        self._wake = threading.Condition()
        self._arrived: deque[_Waiting] = deque()
        self._dropped: deque[int] = deque()  # serials of snapshots
        self._closing = False
        self._broken: Exception | None = None  # why nothing can be sampled any more
        # Used only by the thread:
        shape = device.shape
        self._slots = [Slot(index=index, shard=shape.shard_of(index)) for index in range(shape.num_slots)]
        self._prompts: dict[tuple[Request, int], Prompt] = {}  # by shard, in the order in which they are read
        self._pages, self._rows = self._nothing_held()
        self._experts = ExpertPages(shape, config) if shape.returns_experts else None
        self._line = Line()
        self._waiting: dict[Request, _Waiting] = {}
        self._involved: Sequence[Request] = ()  # in the present step
        self._suspects = Suspects()
        self._reading = False  # tiles count as read that are neither written nor scored yet
        self._unwritten: list[tuple[int, int]] = []  # pages, by shard, that others find though they are not written
        self._thread: threading.Thread | None = None  # started with the first request

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    # The event loop's side ----------------------------------------------------------------------------------------

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        """Keep device arrays by reference, or copy host weights to the device."""
        if snapshot.snapshot_id in self._snapshots:
            return
        self._serials += 1
        serial = self._serials
        if isinstance(snapshot, (adapters.JaxSnapshot, RemoteSnapshot)):
            arrays = snapshot.arrays
        else:
            arrays = await asyncio.to_thread(self._copied, snapshot)
        loaded = LoadedSnapshot(
            snapshot_id=snapshot.snapshot_id, serial=serial, arrays=arrays, scale=snapshot.lora.scale
        )
        self._snapshots.setdefault(snapshot.snapshot_id, _Users(snapshot=loaded))

    async def drop_snapshot(self, snapshot_id: str) -> None:
        users = self._snapshots.pop(snapshot_id, None)
        if users is None:
            return
        if users.count:
            await users.idle.wait()
        self._dropped.append(users.snapshot.serial)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        users = None if op.snapshot_id is None else self._snapshots.get(op.snapshot_id)
        if op.snapshot_id is not None and users is None:
            return Failed(message=f"no snapshot {op.snapshot_id!r} is loaded, load it first", category="server")
        context, wanted = self._device.shape.max_context_tokens, len(op.prompt_P) + op.params.max_tokens
        if not op.fits(context):
            return Failed(message=f"prompt length plus max_tokens is {wanted}, the context window is {context} tokens")
        try:
            request = Request(op, None if users is None else users.snapshot, self._rules)
        except UnsupportedError as error:
            return Failed(message=str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's
            return _fails_alone(error)
        if users is not None:
            users.count += 1
            users.idle.clear()
        try:
            return await self._wait_for(request)
        finally:
            if users is not None:
                users.count -= 1
                if not users.count:
                    users.idle.set()

    def close(self) -> None:
        """Stop after the current dispatch. Every unfinished request fails with a server error."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def num_busy_slots(self) -> int:
        """The number of occupied slots, as of the last dispatch."""
        return sum(slot.draw is not None for slot in self._slots)

    async def _wait_for(self, request: Request) -> SampleOutput | Failed:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request=request, future=loop.create_future(), loop=loop)
        with self._wake:
            if self._broken is not None:
                raise self._broken
            if self._closing:
                return Failed(message=CLOSED, category="server")
            self._arrived.append(waiting)
            self._wake.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
                self._thread.start()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            request.cancelled = True  # checked before the next dispatch
            with self._wake:
                self._wake.notify()
            raise

    def _copied(self, snapshot: Snapshot) -> adapters.Adapter:
        """Copy host weights to the device."""
        if snapshot.lora.rank == 0:
            msg = (
                f"snapshot {snapshot.snapshot_id!r} holds all weights of a model; the jax sampler takes LoRA adapters. "
                "Save it under a name: the checkpoint is a Hugging Face directory, servable as a model of its own"
            )
            raise UnsupportedError(msg)
        greatest = self._device.shape.max_lora_rank
        if snapshot.lora.rank > greatest:
            msg = (
                f"snapshot {snapshot.snapshot_id!r} has rank {snapshot.lora.rank}, this sampler takes up to {greatest}"
            )
            raise UserError(msg)
        padded = class_of(snapshot.lora.rank, greatest)
        weights = snapshot.adapter_weights()
        return self._device.put_adapter(adapters.from_canonical(weights, snapshot.lora, self._config, padded))

    # The thread's side --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_arrived():
                try:
                    self._round()
                except WorkerDiedError:  # the devices are gone: only a new engine has others
                    raise
                except Exception as error:  # noqa: BLE001 - whatever it is, it has an owner
                    self._find_fault(error)
        except BaseException as error:
            logger.exception("sampling cannot go on")
            self._end_with(error)
        finally:  # no request may wait for a thread that has ended
            with self._wake:
                self._closing = True
            self._fail_all(CLOSED)

    def _take_arrived(self) -> bool:
        """Wait until there is something to do. Return False if the thread must end."""
        with self._wake:
            idle = not self._wake.wait_for(self._is_wanted, self._idle_s)
        if idle:
            self._forget_dropped()
            self._give_back()
        with self._wake:
            self._wake.wait_for(self._is_wanted)
            arrived = list(self._arrived)
            self._arrived.clear()
            for waiting in arrived:
                self._waiting[waiting.request] = waiting
            closing = self._closing
        for waiting in arrived:
            self._line.add(waiting.request)
        return not closing

    def _is_wanted(self) -> bool:
        return bool(self._closing or self._arrived or self._waiting)

    def _give_back(self) -> None:
        """Keep nothing that nobody uses: prefixes, adapters, and the memory in which they lay."""
        if self._device.shape.grows:
            (pages,), (rows,) = self._pages, self._rows
            self._device.give_back(pages.give_back(), rows.give_back())

    def _round(self) -> None:
        self._involved = ()
        self._drop_cancelled()
        self._forget_dropped()
        self._fill_slots()
        self._read_prompts()
        self._decode()
        self._release_ended()

    def _drop_cancelled(self) -> None:
        cancelled = [request for request in self._waiting if request.cancelled]
        if cancelled:
            self._line.remove_cancelled()
            for request in cancelled:
                self._forget(request)

    def _forget_dropped(self) -> None:
        while self._dropped:
            serial = self._dropped.popleft()
            for pages, rows in zip(self._pages, self._rows, strict=True):
                pages.forget(serial)
                rows.forget(serial)

    def _fill_slots(self) -> None:
        """Assign free slots to waiting sequences, in order, as long as the next one has room."""
        free = [slot for slot in self._slots if slot.draw is None]
        while free and (draw := self._line.first(self._slots)) is not None:
            self._involved = (draw.request,)
            shards = {shard for shard in {slot.shard for slot in free} if self._has_room(shard, draw.request)}
            suitable = [slot for slot in free if slot.shard in shards]
            if not suitable:
                break
            self._line.remove(draw)
            slot = self._choose(suitable, draw.request)
            free.remove(slot)
            slot.draw = draw
            slot.prompt = self._prompt(draw.request, slot.shard)
            slot.prompt.num_users += 1

    def _has_room(self, shard: int, request: Request) -> bool:
        """Return whether a shard has pages for one more sequence of a request, whatever it draws, and its adapter."""
        shape = self._device.shape
        running = [slot.draw.request for slot in self._slots if slot.shard == shard and slot.draw is not None]
        pages = sum(shape.pages_at_most(each.num_kept) for each in (*running, request))
        has_row = request.snapshot is None or self._rows[shard].has_room(request.serial)
        return has_row and pages < shape.pages_per_shard

    def _choose(self, free: list[Slot], request: Request) -> Slot:
        """Prefer the shard on which the request's prompt is read already, then empty shards, then the first."""
        num_free = Counter(slot.shard for slot in free)
        return max(free, key=lambda slot: ((request, slot.shard) in self._prompts, num_free[slot.shard]))

    def _prompt(self, request: Request, shard: int) -> Prompt:
        known = self._prompts.get((request, shard))
        if known is None:
            known = Prompt(request, shard, self._adapter_row(request, shard))
            self._prompts[request, shard] = known
        return known

    def _adapter_row(self, request: Request, shard: int) -> int:
        """Have the request's adapter in a row of the shard."""
        snapshot, rows = request.snapshot, self._rows[shard]
        if snapshot is None:
            return BASE_MODEL
        row = rows.find(snapshot.serial)
        if row is None:
            row = rows.take()
            try:
                self._device.write_adapter(self._row_on_all(shard, row), snapshot.arrays, snapshot.scale)
            except BaseException:
                rows.put_back(row)
                raise
            rows.name(row, snapshot.serial)
        return row

    def _row_on_all(self, shard: int, row: int) -> int:
        return shard * self._device.shape.adapters_per_shard + row

    def _leave(self, slot: Slot) -> None:
        """Empty a slot. The last one that uses a prompt gives it up."""
        prompt, pages = slot.prompt, self._pages[slot.shard]
        slot.draw, slot.prompt = None, None
        self._give_up_own(slot)
        if prompt is None:
            return
        prompt.num_users -= 1
        if not prompt.num_users:
            del self._prompts[prompt.request, prompt.shard]
            prompt.release(pages)
            if prompt.request.snapshot is not None:
                self._rows[slot.shard].release(prompt.request.serial)

    def _give_up_own(self, slot: Slot) -> None:
        for page in slot.own or ():
            self._pages[slot.shard].release(page)
        slot.own = None

    # Prompts

    def _read_prompts(self) -> None:
        """Read prompts, one after the other, up to the budget of a round, so that decoding continues meanwhile."""
        left = self._prefill_tiles
        for together in self._suspects.groups(prompt.request for prompt in self._prompts.values() if not prompt.ready):
            while left > 0:
                self._involved, self._reading = together, True
                work = self._next_tiles(together, min(left, self._device.shape.prefill_tiles[-1]))
                longest = max(map(len, work))
                if longest:
                    self._prefill([one for shard in work for one in shard])
                self._reading = False
                if not longest:
                    break
                left -= longest
        self._begin_sequences()

    def _next_tiles(self, requests: Sequence[Request], most: int) -> list[list[tuple[Prompt, PromptTile]]]:
        """Return each shard's next tiles, those of one prompt in order."""
        work: list[list[tuple[Prompt, PromptTile]]] = [[] for _ in self._pages]
        wanted = set(requests)
        for prompt in self._prompts.values():
            own = work[prompt.shard]
            while prompt.request in wanted and len(own) < most and (tile := self._next_tile(prompt)) is not None:
                own.append((prompt, tile))
        return work

    def _next_tile(self, prompt: Prompt) -> PromptTile | None:
        """Take what is in the cache already, up to a tile that must be read: return it. It counts as read from here on.

        So another prompt with this prefix has it as well. In one dispatch all tiles are written before they are read.
        """
        pages = self._pages[prompt.shard]
        while not prompt.ready:
            start, tokens, key = prompt.num_read, prompt.next_tokens, prompt.next_key
            page = None if key is None or prompt.request.scores_tile(start, start + len(tokens)) else pages.find(key)
            if page is not None:
                prompt.add(page)
                prompt.num_cached += len(tokens)
                continue
            page = pages.take()
            if key is not None and pages.name(page, key):
                self._unwritten.append((prompt.shard, page))
            before = tuple(prompt.pages)
            prompt.add(page)
            return PromptTile(
                shard=prompt.shard, start=start, tokens=tokens, pages=(*before, page), adapter=prompt.adapter
            )
        return None

    def _prefill(self, work: list[tuple[Prompt, PromptTile]]) -> None:
        experts = self._device.prefill([tile for _, tile in work])
        self._unwritten.clear()
        if self._experts is not None and experts is not None:
            self._experts.write(experts)
        for prompt, tile in work:
            request, end = prompt.request, tile.start + len(tile.tokens)
            if request.scores_tile(tile.start, end):
                self._involved = (request,)
                scores = request.scores
                found = self._device.score(tile, scores.targets[tile.start : end], want_top=scores.wants_top)
                scores.fill(tile.start, *found)
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
                slot.own = [self._pages[slot.shard].share(prompt.rest)]
            else:
                copying.append(slot)
        for together in self._suspects.groups(map(_request, copying)):
            self._involved = together
            self._copy_rest([slot for slot in copying if _request(slot) in set(together)])

    def _copy_rest(self, slots: Sequence[Slot]) -> None:
        copies = []
        for slot in slots:
            assert slot.prompt is not None, "the slot is occupied"
            assert slot.prompt.rest is not None, "there is a page to copy"
            slot.own = [self._pages[slot.shard].take()]
            copies.append(PageCopy(shard=slot.shard, source=slot.prompt.rest, target=slot.own[0]))
        try:
            self._device.copy_pages(copies)
        except BaseException:
            for slot in slots:
                self._give_up_own(slot)
            raise

    # Decoding

    def _decode(self) -> None:
        running = [slot for slot in self._slots if slot.ready]
        for together in self._suspects.groups(_request(slot) for slot in running):
            wanted = set(together)
            self._decode_slots([slot for slot in running if _request(slot) in wanted], together)

    def _decode_slots(self, running: Sequence[Slot], requests: Sequence[Request]) -> None:
        num_steps = self._device.shape.max_steps
        for slot in running:
            self._involved = (_request(slot),)
            slot.reserve(num_steps, self._pages[slot.shard])
        rows = self._in_rows(running)
        given = self._slot_input(rows)
        self._involved = requests
        drawn = self._device.decode(given, num_steps)
        for row, slot in rows.items():
            self._involved = (_request(slot),)
            self._harvest(slot, drawn, row)

    def _in_rows(self, running: Sequence[Slot]) -> dict[int, Slot]:
        """Give each slot a row, the first ones of its shard."""
        shape = self._device.shape
        next_row = [shard * shape.slots_per_shard for shard in range(shape.num_shards)]
        rows = {}
        for slot in running:
            rows[next_row[slot.shard]] = slot
            next_row[slot.shard] += 1
        return rows

    def _slot_input(self, rows: dict[int, Slot]) -> SlotInput:
        given = SlotInput.idle(self._device.shape)
        for row, slot in rows.items():
            self._involved = (_request(slot),)
            _describe(given, row, slot)
        return given

    def _harvest(self, slot: Slot, drawn: Drawn, row: int) -> None:
        draw = slot.draw
        assert draw is not None, "a running slot is occupied"
        top_k = draw.request.op.topk_sample_logprobs
        for step, token in enumerate(drawn.tokens_XB[:, row]):
            if token < 0 or draw.stop_reason is not None:
                return
            draw.push(int(token), float(drawn.logprobs_XB[step, row]))
            if top_k and drawn.top_ids_XBK is not None and drawn.top_logprobs_XBK is not None:
                draw.top_ids.append(drawn.top_ids_XBK[step, row, :top_k])
                draw.top_logprobs.append(drawn.top_logprobs_XBK[step, row, :top_k])
            if drawn.experts_XBLC is not None:
                draw.experts.append(drawn.experts_XBLC[step, row])

    def _release_ended(self) -> None:
        for request in {slot.draw.request for slot in self._slots if slot.draw is not None}:
            self._involved = (request,)
            self._release_ended_of(request)

    def _release_ended_of(self, request: Request) -> None:
        """Free the slots of sequences that have ended. Complete a request once all its sequences have ended."""
        bad = next((d for d in request.draws if d.logprobs and not np.isfinite(d.logprobs[-1])), None)
        if bad is not None:
            self._waiting[request].answer(diverged(request.op))
            self._forget(request)
            return
        for slot in self._slots:
            if slot.draw is not None and slot.draw.request is request and slot.draw.stop_reason is not None:
                if self._experts is not None and slot.prompt is not None:
                    slot.draw.experts_of_prompt = self._experts.of(slot.prompt)
                self._leave(slot)
        if request.finished:
            result = unless_diverged(request.op, request.result())
            self._waiting.pop(request).answer(result)

    # Faults

    def _find_fault(self, error: Exception) -> None:
        """Put everybody back to before the step that failed. Refuse a request that was alone in it.

        Raise the error if it is nobody's: if the device fails by itself, or does not start again.
        """
        involved = [request for request in self._involved if request in self._waiting]
        if not involved:
            raise error
        draws = [slot.draw for slot in self._slots if slot.draw is not None and slot.draw.request in set(involved)]
        if len(involved) > 1:
            logger.warning("a sampling step of %d requests failed, they are tried one by one: %r", len(involved), error)
            self._suspects.add(draws)
        if self._device.is_intact():
            self._read_again()
        else:
            self._start_again()
        if len(involved) == 1:
            self._try_device()
            self._waiting[involved[0]].answer(_fails_alone(error))
            self._forget(involved[0])

    def _read_again(self) -> None:
        """If tiles were being read: take back their pages, and all sequences that may have found them."""
        if not self._reading:
            return
        self._reading = False
        for slot in reversed(self._slots):
            if slot.draw is not None and slot.own is None:
                self._line.put_back(slot.draw)
                self._leave(slot)
        for shard, page in self._unwritten:
            self._pages[shard].unname(page)
        self._unwritten.clear()

    def _start_again(self) -> None:
        """After the device's state is lost: draw every sequence in a slot anew. Its seed gives the same bits."""
        for slot in reversed(self._slots):
            if slot.draw is not None:
                slot.draw.start_again(self._rules.watch(slot.draw.request.op.params))
                self._line.put_back(slot.draw)
            slot.draw, slot.prompt, slot.own = None, None, None
        self._prompts.clear()
        self._unwritten.clear()
        self._reading = False
        self._pages, self._rows = self._nothing_held()
        self._device.reset()

    def _try_device(self) -> None:
        """Decode one token of nobody's, on the page that is nobody's."""
        given = SlotInput.idle(self._device.shape)
        given.left[0] = 1
        self._device.decode(given, 1)

    # Ends

    def _forget(self, request: Request) -> None:
        """Remove a request from slots and queue without completing it."""
        request.cancelled = True
        self._line.remove_cancelled()
        for slot in self._slots:
            if slot.draw is not None and slot.draw.request is request:
                self._leave(slot)
        self._waiting.pop(request, None)

    def _nothing_held(self) -> tuple[list[Pages], list[Rows]]:
        """Return each shard's pages and rows of adapters when it has read nothing."""
        shape = self._device.shape
        shards = range(shape.num_shards)
        pages = [Pages(shape.pages_per_shard, kept=shape.kept_pages) for _ in shards]
        return pages, [Rows(shape.whole_per_shard, grows=shape.grows) for _ in shards]

    def _end_with(self, error: BaseException) -> None:
        """Raise the error to all who wait, and to all who come."""
        if isinstance(error, StopIteration) or not isinstance(error, Exception):  # which no future can hold
            error = RuntimeError(f"{type(error).__name__}: {error}")
        with self._wake:
            self._closing, self._broken = True, error
            everyone = [*self._waiting.values(), *self._arrived]
            self._arrived.clear()
        for waiting in everyone:
            waiting.fail(error)
        self._waiting.clear()

    def _fail_all(self, message: str) -> None:
        with self._wake:
            everyone = [*self._waiting.values(), *self._arrived]
            self._arrived.clear()
        for waiting in everyone:
            waiting.answer(Failed(message=message, category="server"))


def _request(slot: Slot) -> Request:
    assert slot.draw is not None, "the slot is occupied"
    return slot.draw.request


def _fails_alone(error: Exception) -> Failed:
    what = "sampling failed with this request alone"
    reference = log_privately(logger, what, error=error)
    return Failed(message=f"{what} ({reference})", category="server", cause=f"{type(error).__name__}: {error}")


def _describe(given: SlotInput, i: int, slot: Slot) -> None:
    """Fill in row i: where the sequence is, and its sampling parameters."""
    draw, prompt = slot.draw, slot.prompt
    assert draw is not None, "a running slot is occupied"
    assert prompt is not None, "a running slot is occupied"
    request, table = draw.request, slot.table
    params = request.op.params
    given.tokens[i] = draw.tokens[-1] if draw.tokens else request.op.prompt_P[-1]
    given.positions[i] = draw.position
    given.left[i] = params.max_tokens - len(draw.tokens)
    stop = sorted(request.stop_tokens)[:STOP_TABLE]
    given.stop_tokens[i, : len(stop)] = stop
    given.tables[i, : len(table)] = table
    given.adapters[i] = prompt.adapter
    given.seed_words[i] = (params.seed >> 32, params.seed & 0xFFFFFFFF)
    given.sample_index[i] = draw.index
    given.temperature[i] = params.temperature
    given.top_k[i] = params.top_k
    given.top_p[i] = params.top_p
    given.any_top = given.any_top or request.op.topk_sample_logprobs > 0
