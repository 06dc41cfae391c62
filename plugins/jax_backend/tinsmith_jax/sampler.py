"""Continuous sampling: requests join the running batch at the next dispatch and leave it with their last token.

The async side (one event loop) only queues requests and waits for them. One thread owns the slots and the device. In
each round, it drops cancelled requests, fills free slots from the queue, reads some prompt tiles, decodes a few steps
and returns finished sequences.
"""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
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
)
from tinsmith.workers import WorkerDiedError
from tinsmith_jax import adapters
from tinsmith_jax.decode import STOP_TABLE
from tinsmith_jax.layers import TILE
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.remote import RemoteSampling, RemoteSnapshot
from tinsmith_jax.sampling_device import SamplingDevice
from tinsmith_jax.sampling_values import Drawn, PromptTile, SlotInput
from tinsmith_jax.slots import Draw, Line, LoadedSnapshot, Request, Slot

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
        prefill_tokens: int,
    ) -> None:
        self._device = device
        self._capabilities = capabilities
        self._config = config
        self._rules = rules
        self._prefill_tiles = max(1, prefill_tokens // TILE)
        self._snapshots: dict[str, _Users] = {}  # touched on the event loop only
        self._serials = 0
        # Shared by the loop and the thread, guarded by `_wake`:
        self._wake = threading.Condition()
        self._arrived: deque[_Waiting] = deque()
        self._closing = False
        self._broken: Exception | None = None  # why nothing can be sampled any more
        # Used only by the thread:
        shape = device.shape
        self._slots = [Slot(index=index, shard=shape.shard_of(index)) for index in range(shape.num_slots)]
        self._line = Line()
        self._waiting: dict[Request, _Waiting] = {}
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
        arrays = await asyncio.to_thread(self._arrays_of, snapshot)
        loaded = LoadedSnapshot(
            snapshot_id=snapshot.snapshot_id, serial=serial, arrays=arrays, scale=snapshot.lora.scale
        )
        self._snapshots.setdefault(snapshot.snapshot_id, _Users(snapshot=loaded))

    async def drop_snapshot(self, snapshot_id: str) -> None:
        users = self._snapshots.pop(snapshot_id, None)
        if users is not None and users.count:
            await users.idle.wait()

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        users = None if op.snapshot_id is None else self._snapshots.get(op.snapshot_id)
        if op.snapshot_id is not None and users is None:
            return Failed(message=f"no snapshot {op.snapshot_id!r} is loaded, load it first", category="server")
        context, wanted = self._device.shape.max_context_tokens, len(op.prompt_P) + op.params.max_tokens
        if wanted > context:
            return Failed(message=f"prompt length plus max_tokens is {wanted}, the context window is {context} tokens")
        try:
            request = Request(op, None if users is None else users.snapshot, self._rules)
        except UnsupportedError as error:
            return Failed(message=str(error))
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

    def _arrays_of(self, snapshot: Snapshot) -> adapters.Adapter:
        if isinstance(snapshot, (adapters.JaxSnapshot, RemoteSnapshot)):
            return snapshot.arrays
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
        padded = adapters.class_of(snapshot.lora.rank, greatest)
        weights = snapshot.adapter_weights()
        return self._device.put_adapter(adapters.from_canonical(weights, snapshot.lora, self._config, padded))

    # The thread's side --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_arrived():
                try:
                    self._round()
                except WorkerDiedError as error:  # the devices are gone: only a new engine has others
                    self._end_with(error)
                    return
                except Exception as error:
                    logger.exception("a sampling dispatch failed")
                    self._fail_running(f"a sampling dispatch failed: {type(error).__name__}: {error}")
        finally:  # no request may wait for a thread that has ended
            with self._wake:
                self._closing = True
            self._fail_all(CLOSED)

    def _take_arrived(self) -> bool:
        """Wait until there is something to do. Return False if the thread must end."""
        with self._wake:
            while not (self._closing or self._arrived or self._waiting):
                self._wake.wait()
            arrived = list(self._arrived)
            self._arrived.clear()
            for waiting in arrived:
                self._waiting[waiting.request] = waiting
            closing = self._closing
        for waiting in arrived:
            self._line.add(waiting.request)
        return not closing

    def _round(self) -> None:
        self._drop_cancelled()
        self._fill_slots()
        self._read_prompts()
        self._decode()

    def _drop_cancelled(self) -> None:
        cancelled = [request for request in self._waiting if request.cancelled]
        if cancelled:
            self._line.remove_cancelled()
            for request in cancelled:
                self._forget(request)

    def _fill_slots(self) -> None:
        """Assign free slots to waiting sequences."""
        free = [slot for slot in self._slots if slot.draw is None]
        while free and (draw := self._line.take(self._slots)) is not None:
            snapshot = draw.request.snapshot
            serial = 0 if snapshot is None else snapshot.serial
            slot = self._choose(free, draw.request, serial)
            free.remove(slot)
            slot.occupy(draw)
            if snapshot is not None and slot.adapter_serial != serial:
                slot.adapter_serial = 0  # until the adapter is written: a failure must not leave a wrong serial
                self._device.write_adapter(slot.index, snapshot.arrays, snapshot.scale)
                slot.adapter_serial = serial

    def _choose(self, free: list[Slot], request: Request, serial: int) -> Slot:
        """Prefer the shard on which the request's prompt is read already; slots that hold their adapter; empty shards.

        If all is equal, take the first.
        """
        shards = {slot.shard for slot in self._slots if slot.draw is not None and slot.draw.request is request}
        num_free = Counter(slot.shard for slot in free)
        return max(free, key=lambda slot: (slot.shard in shards, slot.adapter_serial == serial, num_free[slot.shard]))

    # Prompts

    def _read_prompts(self) -> None:
        """Read prompts, slot by slot, up to the budget of a round, so that decoding continues meanwhile."""
        left = self._prefill_tiles
        while left > 0:
            self._copy_prompts()
            work = self._next_tiles(left)
            longest = max(map(len, work))
            if not longest:
                return
            sizes = self._device.shape.prefill_tiles
            count = max((size for size in sizes if size <= longest), default=longest)
            self._prefill([one for shard in work for one in shard[:count]])
            left -= count

    def _copy_prompts(self) -> None:
        """Copy a prompt that one sequence of a request has read to the request's other sequences on the shard."""
        for slot in self._slots:
            if slot.draw is None or slot.ready:
                continue
            source = next((other for other in self._siblings(slot) if other.ready), None)
            if source is not None:
                num_tokens = slot.draw.request.num_prefill
                self._device.copy_slot(source.index, slot.index, num_tokens)
                slot.num_cached = num_tokens

    def _next_tiles(self, most: int) -> list[list[tuple[Slot, PromptTile]]]:
        """Return each shard's next tiles: those of each request's leading reader, the tiles of one prompt in order."""
        work: list[list[tuple[Slot, PromptTile]]] = [[] for _ in range(self._device.shape.num_shards)]
        for slot in self._slots:
            if slot.draw is None or slot.ready or slot is not self._reader(slot):
                continue
            request, own = slot.draw.request, work[slot.shard]
            for start in range(slot.num_cached, request.num_prefill, TILE)[: most - len(own)]:
                tokens = request.op.prompt_P[start : min(start + TILE, request.num_prefill)]
                adapted = request.snapshot is not None
                own.append((slot, PromptTile(slot=slot.index, start=start, tokens=tokens, adapted=adapted)))
        return work

    def _reader(self, slot: Slot) -> Slot:
        """Return which slot of a request reads its prompt on the shard: the one furthest ahead. The others copy it."""
        return max(self._siblings(slot), key=lambda sibling: sibling.num_cached)

    def _prefill(self, work: list[tuple[Slot, PromptTile]]) -> None:
        self._device.prefill([tile for _, tile in work])
        for slot, tile in work:
            assert slot.draw is not None, "only occupied slots read"
            request, end = slot.draw.request, tile.start + len(tile.tokens)
            scores = request.scores
            if end > request.scored_tokens and scores.wants(tile.start, end):
                targets_TK = scores.targets[tile.start : end]
                found = self._device.score(tile, targets_TK, want_top=scores.wants_top)
                scores.fill(tile.start, *found)
            request.scored_tokens = max(request.scored_tokens, end)
            slot.num_cached = end

    def _siblings(self, slot: Slot) -> list[Slot]:
        """Return the slots of the same request on the same shard: slots of one shard share a prompt by copying."""
        assert slot.draw is not None, "a free slot has no siblings"
        request = slot.draw.request
        of_shard = self._slots[slot.shard * (size := self._device.shape.slots_per_shard) :][:size]
        return [other for other in of_shard if other.draw is not None and other.draw.request is request]

    # Decoding

    def _decode(self) -> None:
        running = [slot for slot in self._slots if slot.ready]
        if not running:
            return
        drawn = self._device.decode(self._slot_input(), self._device.shape.max_steps)
        for slot in running:
            self._harvest(slot, drawn)
        for request in {slot.draw.request for slot in running if slot.draw is not None}:
            self._release_ended(request)

    def _slot_input(self) -> SlotInput:
        given = SlotInput.idle(len(self._slots))
        for slot in self._slots:
            if slot.draw is None:
                continue
            # An idle slot of the batch still writes at its position: let that be the next position to be filled.
            given.positions[slot.index] = slot.num_cached
            if slot.ready:
                _describe(given, slot, slot.draw)
        return given

    def _harvest(self, slot: Slot, drawn: Drawn) -> None:
        draw = slot.draw
        assert draw is not None, "a running slot is occupied"
        top_k = draw.request.op.topk_sample_logprobs
        for step, token in enumerate(drawn.tokens_XB[:, slot.index]):
            if token < 0 or draw.stop_reason is not None:
                return
            draw.push(int(token), float(drawn.logprobs_XB[step, slot.index]))
            if top_k and drawn.top_ids_XBK is not None and drawn.top_logprobs_XBK is not None:
                draw.top_ids.append(drawn.top_ids_XBK[step, slot.index, :top_k])
                draw.top_logprobs.append(drawn.top_logprobs_XBK[step, slot.index, :top_k])

    def _release_ended(self, request: Request) -> None:
        """Free the slots of sequences that have ended. Complete a request once all its sequences have ended."""
        bad = next((d for d in request.draws if d.logprobs and not np.isfinite(d.logprobs[-1])), None)
        if bad is not None:
            whose = "the base model" if request.snapshot is None else f"snapshot {request.snapshot.snapshot_id!r}"
            message = f"{whose} gives logits that are not finite: its weights have diverged, sample an earlier one"
            self._waiting[request].answer(Failed(message=message))
            self._forget(request)
            return
        for slot in self._slots:
            if slot.draw is not None and slot.draw.request is request and slot.draw.stop_reason is not None:
                slot.draw = None
        if request.finished:
            self._waiting.pop(request).answer(request.result())

    # Ends

    def _forget(self, request: Request) -> None:
        """Remove a request from slots and queue without completing it."""
        request.cancelled = True
        self._line.remove_cancelled()
        for slot in self._slots:
            if slot.draw is not None and slot.draw.request is request:
                slot.draw = None
        self._waiting.pop(request, None)

    def _fail_running(self, message: str) -> None:
        """Fail the requests that have a sequence in a slot. Queued ones start on a fresh device state."""
        for request in {slot.draw.request for slot in self._slots if slot.draw is not None}:
            self._waiting[request].answer(Failed(message=message, category="server"))
            self._forget(request)
        for slot in self._slots:
            slot.adapter_serial = 0
        self._device.reset()

    def _end_with(self, error: Exception) -> None:
        """Raise the error to all who wait, and to all who come."""
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


def _describe(given: SlotInput, slot: Slot, draw: Draw) -> None:
    """Fill in a decoding slot: its position and its sampling parameters."""
    request, i = draw.request, slot.index
    params, prompt_P = request.op.params, request.op.prompt_P
    given.tokens[i] = draw.tokens[-1] if draw.tokens else prompt_P[-1]
    given.positions[i] = len(prompt_P) - 1 + len(draw.tokens)
    given.left[i] = params.max_tokens - len(draw.tokens)
    stop = sorted(request.stop_tokens)[:STOP_TABLE]
    given.stop_tokens[i, : len(stop)] = stop
    given.adapted[i] = request.snapshot is not None
    given.seed_words[i] = (params.seed >> 32, params.seed & 0xFFFFFFFF)
    given.sample_index[i] = draw.index
    given.temperature[i] = params.temperature
    given.top_k[i] = params.top_k
    given.top_p[i] = params.top_p
    given.any_top = given.any_top or request.op.topk_sample_logprobs > 0
