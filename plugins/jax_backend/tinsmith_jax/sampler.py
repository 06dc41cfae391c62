"""Continuous sampling: requests join the running batch at the next dispatch and leave it with their last token.

This is the event loop's side. It keeps snapshots, puts requests into the inbox, and waits for their results. One
thread draws them, round after round.
"""

import asyncio
import threading
from dataclasses import dataclass, field

from tinsmith import (
    Failed,
    Figures,
    OnTokens,
    Sample,
    SampleOutput,
    SamplerCapabilities,
    SamplingBackend,
    Snapshot,
    UnsupportedError,
    UserError,
)
from tinsmith_checkpoints.huggingface import StopRules
from tinsmith_jax.adapters import Adapter, DeviceSnapshot, from_canonical
from tinsmith_jax.inbox import Inbox
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.rank_classes import class_of
from tinsmith_jax.requests import LoadedSnapshot, Request
from tinsmith_jax.rounds import Rounds, fails_alone
from tinsmith_jax.sampling_values import SamplerDevice
from tinsmith_jax.slots import Slots
from tinsmith_jax.tiles import TILE


@dataclass(slots=True, kw_only=True, eq=False)
class _Users:
    """The running samples of a snapshot: those that asked for it, and those that were moved to it."""

    snapshot: LoadedSnapshot
    moved_to: "_Users | None" = None  # with which those that asked for it go on
    asked: set[Request] = field(default_factory=set)
    moved: set[Request] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # whenever one has ended or left

    @property
    def current(self) -> LoadedSnapshot:
        """Return the snapshot from which those that ask for this one are drawn."""
        return self.snapshot if self.moved_to is None else self.moved_to.snapshot

    def begin(self, request: Request) -> None:
        self.asked.add(request)
        if self.moved_to is not None:
            self.moved_to.moved.add(request)

    def move(self, newer: "_Users") -> None:
        former, self.moved_to = self.moved_to, newer
        newer.moved |= self.asked
        for request in self.asked:
            request.newest = newer.snapshot
        if former is not None and former is not newer:
            former.moved -= self.asked
            former.changed.set()

    def end(self, request: Request) -> None:
        self.asked.remove(request)
        self.changed.set()
        if self.moved_to is not None:
            self.moved_to.moved.discard(request)
            self.moved_to.changed.set()

    async def ended(self) -> None:
        while self.asked or self.moved:
            self.changed.clear()
            await self.changed.wait()


class Sampler(SamplingBackend):
    """Samples on a device that it may share with training, taking turns."""

    def __init__(
        self,
        device: SamplerDevice,
        config: ModelConfig,
        *,
        capabilities: SamplerCapabilities,
        rules: StopRules,
        prefill_tokens: int | None,
        idle_s: float = 60.0,
        figures: Figures | None = None,
    ) -> None:
        """`idle_s`: seconds without a request after which nothing is kept for later ones."""
        self._device, self._config, self._capabilities, self._rules = device, config, capabilities, rules
        self._snapshots: dict[str, _Users] = {}
        self._serials = 0
        tokens = prefill_tokens or max(512, device.shape.prefill_tiles[-1] * TILE)
        self._inbox = Inbox()
        self._thread: threading.Thread | None = None  # started with the first request
        self._rounds = Rounds(
            device,
            config,
            rules,
            self._inbox,
            tiles_per_round=max(1, tokens // TILE),
            idle_s=idle_s,
            figures=figures or Figures(),
        )

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self._capabilities

    @property
    def slots(self) -> Slots:
        """The slots, as of the last dispatch. Only the sampler's thread changes them, unless nothing is sampled."""
        return self._rounds.slots

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        """Keep device arrays by reference, or copy host weights to the device."""
        if snapshot.snapshot_id in self._snapshots:
            return
        self._serials += 1
        serial = self._serials
        if isinstance(snapshot, DeviceSnapshot):
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
        await users.ended()
        self._inbox.drop(users.snapshot.serial)

    async def move_samples(self, snapshot_id: str, newer_id: str) -> None:
        """The thread takes the newer snapshot before its next dispatch."""
        self._snapshots[snapshot_id].move(self._snapshots[newer_id])

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self._sample(op)

    async def sample_streaming(self, op: Sample, on_tokens: OnTokens) -> SampleOutput | Failed:
        return await self._sample(op, on_tokens)

    async def _sample(self, op: Sample, on_tokens: OnTokens | None = None) -> SampleOutput | Failed:
        users = None if op.snapshot_id is None else self._snapshots.get(op.snapshot_id)
        if op.snapshot_id is not None and users is None:
            return Failed(message=f"no snapshot {op.snapshot_id!r} is loaded, load it first", category="server")
        context, wanted = self._device.shape.max_context_tokens, len(op.prompt_P) + op.params.max_tokens
        if not op.fits(context):
            return Failed(message=f"prompt length plus max_tokens is {wanted}, the context window is {context} tokens")
        try:
            request = Request(op, None if users is None else users.current, self._rules, on_tokens)
        except UnsupportedError as error:
            return Failed(message=str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's
            return fails_alone(error)
        if users is not None:
            users.begin(request)
        try:
            return await self._inbox.ask(request, self._begin)
        finally:
            if users is not None:
                users.end(request)

    def close(self) -> None:
        """Stop after the current dispatch. Every unfinished request fails with a server error."""
        self._inbox.close()
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._rounds.run, name="sampler", daemon=True)
            self._thread.start()

    def _copied(self, snapshot: Snapshot) -> Adapter:
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
        return self._device.put_adapter(from_canonical(snapshot.adapter_weights(), snapshot.lora, self._config, padded))
