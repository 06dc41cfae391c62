"""The sampling backend: snapshots become adapters or weights of replicas; samples go to the least busy one."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from tinsmith import (
    BackendContext,
    ConfigError,
    Failed,
    OnTokens,
    Sample,
    SampleOutput,
    SamplerCapabilities,
    SamplingBackend,
    ServerError,
    Snapshot,
    UnsupportedError,
    UserError,
    diverged,
    log_privately,
    unless_diverged,
)
from tinsmith_checkpoints.huggingface import (
    StopRules,
    StoredTensors,
    has_experts,
    read_model_config,
    weight_places,
)
from tinsmith_vllm.adapters import AdapterFiles, DivergedError
from tinsmith_vllm.compat import MAX_TEMPERATURE, MIN_TEMPERATURE
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.demand import known_shape
from tinsmith_vllm.drawing import Drawing
from tinsmith_vllm.ends import MAX_FAILED_STARTS, REPEATEDLY, Ends
from tinsmith_vllm.launching import launches
from tinsmith_vllm.memory import AdapterMemory
from tinsmith_vllm.messages import Abort, Count, Counted, Drawn, Load, Loaded, Ready, Refused, Rest, Unload
from tinsmith_vllm.replica import Answer, Replica, ReplicaDiedError, ReplicaGoneError
from tinsmith_vllm.routing import WORTH, Prefixes

_TOLD: Final = ("Qwen3MoeForCausalLM",)
"""The classes for which it is tested that vLLM tells each token's experts."""
_ISOLATION_ERROR: Final = 2e-5  # at temperature 1, on CPU in float32

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Adapter:
    """A loaded snapshot, and the replicas that know of it. `idle` is set while nothing is sampled from it."""

    adapter_id: int
    path: Path  # of a directory or of memory
    files: AdapterMemory | AdapterFiles
    replicas: list[Replica]
    num_samples: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class VllmSampler(SamplingBackend):
    """Ready once constructed. A replica that dies is restarted, and its samples are drawn again.

    Replicas that merge have the weights of one snapshot at a time; the vLLM process takes turns among those that are
    asked for (`weights_queue.py`). The others apply adapters.
    """

    def __init__(self, config: VllmConfig, context: BackendContext) -> None:
        self._config = config
        self._model_path = context.model_directory
        self.rules = StopRules.of_model(self._model_path)
        ids, on_disk = count(1), context.cache_dir / "weights"
        self.files: AdapterMemory | AdapterFiles
        if config.shared_memory_dir is None and AdapterMemory.is_available():
            self.files = AdapterMemory(ids)
        else:
            self.files = AdapterFiles(config.shared_memory_dir, context.cache_dir / "adapters", ids)
        self._large_files = AdapterFiles(config.shared_memory_dir or on_disk, on_disk, ids)  # too large for memory
        self.adapters: dict[str, _Adapter] = {}
        self._diverged: set[str] = set()  # ids of snapshots that vLLM is not told of
        self._loading: dict[str, asyncio.Lock] = {}
        self._request_ids = count(1)
        self._prefixes = Prefixes[Replica]()
        self._experts = _experts_of_token(self._model_path) if context.routing_replay else None
        self.all_replicas = [
            Replica(launch, f"vllm replica {number}")
            for number, launch in enumerate(
                launches(
                    config,
                    self._model_path,
                    context.cache_dir,
                    context.placement,
                    routed_experts=self._experts is not None,
                    sleeps=context.sleeps,
                )
            )
        ]
        try:
            described = [
                replica.wait_until_ready(lambda: context.progress("starting vllm", None))
                for replica in self.all_replicas
            ]
        except ReplicaGoneError as error:
            ended = [replica for replica in self.all_replicas if replica.is_gone]
            self.close()
            if any(replica.is_unstartable for replica in ended):
                raise ConfigError(str(error)) from error
            if all(replica.is_from_outside for replica in ended):
                raise ServerError(str(error)) from error
            raise RuntimeError(str(error)) from error  # a crash: it ended by itself, and will a few times more
        except BaseException:
            self.close()
            raise
        self._ready = described[0]
        number = len(self.all_replicas) - config.full_replicas
        self.replicas, further = self.all_replicas[:number], self.all_replicas[number:]
        self._full_replicas = further or (self.replicas if self._ready.merges else [])
        _log.info("vllm %s answers on %s: %s", self._ready.version, self._ready.device, self._how())
        self._capabilities = self._describe(self._ready)
        self._asleep = False

    def _how(self) -> str:
        how = "each replica applies many adapters at a time"
        if self._ready.merges:
            how = "adapters are merged, each replica has the weights of one snapshot at a time"
        return f"{how}; fully trained models: {len(self._full_replicas) or 'no'} replicas"

    def _describe(self, ready: Ready) -> SamplerCapabilities:
        experts = has_experts(read_model_config(self._model_path))
        bounded = ready.device == "cpu" and ready.dtype == "float32" and not experts
        return SamplerCapabilities(
            device=ready.device,
            dtype=ready.dtype,
            vocab_size=ready.vocab_size,
            max_context_tokens=ready.max_model_len,
            max_lora_rank=self._config.max_lora_rank,
            lora_targets=frozenset(ready.targets),
            full_fine_tuning=bool(self._full_replicas),
            # Kernels round differently depending on the number of rows in a batch: benchmarks/sampler_isolation.py
            # measured up to 6e-6 on CPU in float32. Other devices are not measured, so nothing is claimed for them. Nor
            # is it for experts: rounding may turn a near tie of the router, and then no bound holds.
            isolation="close" if bounded else "none",
            isolation_error=_ISOLATION_ERROR if bounded else 0.0,
            prompt_logprobs=True,
            target_prompt_logprobs=True,
            min_temperature=MIN_TEMPERATURE,
            max_temperature=MAX_TEMPERATURE,
            max_topk_logprobs=min(self._config.max_topk_logprobs, ready.vocab_size),
            stop_strings=self.rules.tokenizer is not None,
            returns_routed_experts=self._experts is not None,
            max_sequences=self._config.max_num_seqs * len(self.replicas),
        )

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self._capabilities

    @property
    def trouble(self) -> str | None:
        if self._asleep:
            return None
        for group in (self.replicas, self._full_replicas):
            running = [replica for replica in group if replica.is_running]
            if group and not running:
                return group[0].trouble or "vllm has ended, and starts again"
            if group and all(replica.gate.is_reserved for replica in running):
                return "vllm has died, and what it was drawing is drawn again one by one"
        return None

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the running replicas."""
        return [replica.pid for replica in self.all_replicas if replica.pid is not None]

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        """Put the snapshot where vLLM can read it, and announce it.

        Replicas that apply adapters read them at once while their batch keeps running, others when they are needed.
        """
        self._expect_awake()
        async with self._loading.setdefault(snapshot.snapshot_id, asyncio.Lock()):
            if snapshot.snapshot_id in self.adapters or snapshot.snapshot_id in self._diverged:
                return
            self._check(snapshot)
            try:
                adapter = await asyncio.to_thread(self._write, snapshot)
            except DivergedError:
                self._diverged.add(snapshot.snapshot_id)
                return
            try:
                await self._announce(snapshot.snapshot_id, adapter)
            except BaseException:
                self._forget(adapter)
                raise
            adapter.idle.set()
            self.adapters[snapshot.snapshot_id] = adapter

    def _write(self, snapshot: Snapshot) -> _Adapter:
        if snapshot.lora.rank == 0:
            adapter_id, path = self._large_files.write_all(snapshot, self._base_shapes(), self._ready.dtype)
            return _Adapter(adapter_id, path, self._large_files, self._full_replicas)
        if self._ready.merges:
            places = weight_places(read_model_config(self._model_path), self._base_shapes())
            adapter_id, path = self.files.write_changes(snapshot, places)
        else:
            adapter_id, path = self.files.write(snapshot, str(self._model_path))
        return _Adapter(adapter_id, path, self.files, self.replicas)

    def _base_shapes(self) -> dict[str, tuple[int, ...]]:
        return StoredTensors.of(self._model_path, "model").shapes()

    async def _announce(self, snapshot_id: str, adapter: _Adapter) -> None:
        # the prefix cache is keyed by the name
        name = f"{snapshot_id}#{adapter.adapter_id}"
        load = Load(adapter_id=adapter.adapter_id, name=name, path=str(adapter.path), prepare=True)
        if adapter.replicas is self.replicas and not self._ready.merges:
            await self._load_everywhere(snapshot_id, load)
            return
        for replica in adapter.replicas:
            replica.tell(msgspec.structs.replace(load, prepare=False))

    def _check(self, snapshot: Snapshot) -> None:
        if snapshot.lora.rank == 0 and not self._full_replicas:
            msg = (
                f"snapshot {snapshot.snapshot_id!r} holds all weights of a model, and no replica loads such: the "
                "sampler's setting full_replicas"
            )
            raise UnsupportedError(msg)
        if snapshot.lora.rank > self._config.max_lora_rank:
            msg = (
                f"snapshot {snapshot.snapshot_id!r} has rank {snapshot.lora.rank}; this sampler takes up to "
                f"{self._config.max_lora_rank}: its setting max_lora_rank"
            )
            raise UserError(msg)

    async def _load_everywhere(self, snapshot_id: str, load: Load) -> None:
        hoped_for = [replica for replica in self.replicas if not replica.is_gone] or self.replicas
        running = [replica for replica in hoped_for if replica.is_running] or hoped_for
        for replica in hoped_for:
            if replica not in running:  # restarting: it reads the adapter when needed, so do not wait for it
                replica.tell(msgspec.structs.replace(load, prepare=False))
        answers = await asyncio.gather(*(self._load(replica, load) for replica in running))
        for answer in answers:
            if isinstance(answer, Loaded) and answer.error:
                msg = f"vllm rejects the adapter of snapshot {snapshot_id!r}: {answer.error}"
                raise UnsupportedError(msg)

    @staticmethod
    async def _load(replica: Replica, load: Load) -> Answer:
        """Return the answer. If the replica dies, its successor is told of the adapter and reads it when needed."""
        key = ("adapter", load.adapter_id)
        call = replica.ask(key, load)
        try:
            answer = await call.answers.get()
        finally:
            replica.forget(key)
        return answer

    @staticmethod
    def _forget(adapter: _Adapter) -> None:
        for replica in adapter.replicas:
            replica.tell(Unload(adapter_id=adapter.adapter_id))
        adapter.files.remove(adapter.path)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        self._expect_awake()
        adapter = self.adapters.pop(snapshot_id, None)
        self._diverged.discard(snapshot_id)
        self._loading.pop(snapshot_id, None)
        if adapter is not None:
            await adapter.idle.wait()
            self._forget(adapter)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self._sample(op)

    async def sample_streaming(self, op: Sample, on_tokens: OnTokens) -> SampleOutput | Failed:
        return await self._sample(op, on_tokens)

    async def _sample(self, op: Sample, on_tokens: OnTokens | None = None) -> SampleOutput | Failed:
        self._expect_awake()
        refusal = self._refusal(op)
        if refusal is not None:
            return refusal
        if op.snapshot_id in self._diverged:
            return diverged(op)
        adapter = None if op.snapshot_id is None else self.adapters.get(op.snapshot_id)
        if op.snapshot_id is not None and adapter is None:
            return Failed(message=f"no snapshot {op.snapshot_id!r} is loaded, load it first", category="server")
        async with _using(adapter):
            if adapter is None:
                return await self._insist(op, 0, self.replicas, on_tokens)
            return await self._insist(op, adapter.adapter_id, adapter.replicas, on_tokens)

    async def sleep_sampler(self) -> None:
        """The processes' weights go to the memory of the host. One that dies in its sleep starts again on waking."""
        if self._asleep:
            return
        for replica in self.all_replicas:
            replica.hold_back()
        await asyncio.gather(*(self._rest(replica, asleep=True) for replica in self.all_replicas))
        self._asleep = True

    async def wake_sampler(self) -> None:
        if not self._asleep:
            return
        for replica in self.all_replicas:
            replica.go_on()
        await asyncio.gather(*(self._rest(replica, asleep=False) for replica in self.all_replicas))
        self._asleep = False

    async def _rest(self, replica: Replica, *, asleep: bool) -> None:
        """Return when the process sleeps, or is awake. One that dies has given all back, and its successor is awake."""
        request_id = next(self._request_ids)
        key = ("request", request_id)
        with suppress(ReplicaGoneError):  # for good
            call = replica.ask(key, Rest(request_id=request_id, asleep=asleep))
            try:
                await call.answers.get()
            finally:
                replica.forget(key)

    def _expect_awake(self) -> None:
        if self._asleep:
            msg = "vllm sleeps: wake it first"
            raise RuntimeError(msg)

    def _refusal(self, op: Sample) -> Failed | None:
        context, wanted = self._capabilities.max_context_tokens, len(op.prompt_P) + op.params.max_tokens
        if not op.fits(context):
            return Failed(message=f"prompt length plus max_tokens is {wanted}, the context window is {context} tokens")
        temperature = op.params.temperature
        if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            return Failed(
                message=f"temperature {temperature} is not supported by vllm: use 0 (greedy), or {MIN_TEMPERATURE} to "
                f"{MAX_TEMPERATURE}"
            )
        try:
            self.rules.watch(op.params)
        except UnsupportedError as error:
            return Failed(message=str(error))
        return None

    async def _insist(
        self, op: Sample, adapter_id: int, replicas: list[Replica], on_tokens: OnTokens | None
    ) -> SampleOutput | Failed:
        """Sample, and draw again if the replica dies: the same seeds give the same tokens.

        What a dying replica was drawing is drawn again together, once. Any sample that it was drawing at two deaths is
        a suspect, and drawn again alone. So the one that kills fails by itself, and the others succeed.
        """
        ends = Ends(replicas)
        while True:
            replica = self._choose(replicas, op, adapter_id, ends)
            if ends.waited_in_vain(replica):
                return _not_started(replica)
            waited = replica.gate.is_reserved
            try:
                async with replica.gate.entered(alone=ends.is_suspect):
                    if waited and self._choose(replicas, op, adapter_id, ends) is not replica:
                        continue
                    if ends.waited_in_vain(replica):  # while it was in the gate's queue
                        return _not_started(replica)
                    output = await self._draw(replica, op, adapter_id, on_tokens)
                    replica.deaths_in_a_row = 0
                    return output
            except ReplicaDiedError as error:
                _log.warning("a sample is drawn again: %s", error)
                ends.add(replica, error.death)
                if ends.are_enough():
                    return Failed(message=f"{ends}: {error}", category="server")

    def _choose(self, replicas: list[Replica], op: Sample, adapter_id: int, ends: Ends) -> Replica:
        """Return the least busy running replica, if any runs: a restarting one is idle, but needs minutes.

        One that has read the beginning of the prompt may be somewhat busier. Merging replicas: prefer one that is not
        busy with other weights. One that has died again and again comes last, and one where a suspect is drawn alone. A
        sample stays with the replica that died over it, unless that has died again and again.
        """
        if (own := ends.own) is not None and own.deaths_in_a_row < REPEATEDLY and not own.is_gone:
            return own
        merges = self._ready.merges or replicas is self._full_replicas
        known = self._prefixes.location_of(op, adapter_id)

        def cost(each: Replica) -> tuple[bool, bool, bool, bool, int, int]:
            busy = each.num_sequences.total()
            others = busy - each.num_sequences[adapter_id] if merges else 0
            worth = WORTH * ((each is known) - each.deaths_in_a_row)
            return each.is_gone, not each.is_running, each in ends.died, each.gate.is_reserved, others, busy - worth

        chosen = min(replicas, key=cost)
        self._prefixes.remember(op, adapter_id, chosen)
        return chosen

    async def _draw(
        self, replica: Replica, op: Sample, adapter_id: int, on_tokens: OnTokens | None
    ) -> SampleOutput | Failed:
        drawing = Drawing(next(self._request_ids), op, self.rules, self._experts, on_tokens)
        key = ("request", drawing.request_id)
        call = replica.ask(key, drawing.generate(adapter_id))
        replica.num_sequences[adapter_id] += op.num_samples
        ended = False
        try:
            while not drawing.is_done:
                answer = await call.answers.get()
                match answer:
                    case Drawn():
                        if surplus := drawing.take(answer):
                            replica.tell(Abort(request_id=drawing.request_id, indices=surplus))
                    case Refused():
                        ended = True
                        return _refused(answer)
                    case ReplicaDiedError():
                        ended = True
                        raise answer
                    case _:
                        raise AssertionError(answer)
            ended = True
            return unless_diverged(op, drawing.output())
        finally:
            if not ended:  # cancelled
                replica.tell(Abort(request_id=drawing.request_id, indices=list(range(op.num_samples))))
            replica.num_sequences -= Counter({adapter_id: op.num_samples})
            replica.forget(key)

    async def num_running(self) -> int:
        """Ask every replica how many sequences it holds, including waiting ones."""
        total = 0
        for replica in self.all_replicas:
            request_id = next(self._request_ids)
            call = replica.ask(("request", request_id), Count(request_id=request_id))
            try:
                answer = await call.answers.get()
            finally:
                replica.forget(("request", request_id))
            if isinstance(answer, ReplicaDiedError):
                raise answer
            assert isinstance(answer, Counted), answer
            total += answer.num_sequences
        return total

    def close(self) -> None:
        for replica in self.all_replicas:
            replica.close()
        self.files.close()
        self._large_files.close()


def _not_started(replica: Replica) -> Failed:
    message = f"vllm did not start {MAX_FAILED_STARTS} times while this sample waited: {replica.trouble}"
    return Failed(message=message, category="server")


def _refused(answer: Refused) -> Failed:
    if answer.is_for_sender:
        return Failed(message=f"vllm refuses the sample: {answer.message}")
    reference = log_privately(_log, f"vllm refuses a sample: {answer.message}")
    return Failed(message=f"vllm cannot draw this sample ({reference})", category="server", cause=answer.message)


def _experts_of_token(model_path: Path) -> tuple[int, int] | None:
    """Return the layers with experts, and the experts of a token in each; None: vLLM is not asked for them."""
    shape = known_shape(read_model_config(model_path))
    if shape is None or shape.experts is None or shape.class_name not in _TOLD:
        return None
    return shape.num_layers, shape.experts.top_k


@asynccontextmanager
async def _using(adapter: _Adapter | None) -> AsyncIterator[None]:
    if adapter is None:
        yield
        return
    adapter.num_samples += 1
    adapter.idle.clear()
    try:
        yield
    finally:
        adapter.num_samples -= 1
        if not adapter.num_samples:
            adapter.idle.set()
