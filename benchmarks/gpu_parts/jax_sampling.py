"""The jax sampler on one GPU: long sequences of an adapter, prompts, hand-over, and the trainer's logprobs.

Trainer and sampler share the random weights. Each dispatch of the device is timed inside the sampler, which serves
seeded requests as the engine would send them.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from gpu_parts.common import Notes, Options, Report, linear_parameters, measured_again
from gpu_parts.jax_common import (
    bandwidth_limit,
    compile_seconds,
    kernel_times,
    made_backend,
    matmul_limit,
    peak_gib,
    seconds,
    start,
)  # fmt: skip
from tinsmith.backend import HostSnapshot, ModelState
from tinsmith.operations import (
    Array,
    CreateModel,
    Datum,
    Failed,
    Forward,
    LoraConfig,
    Sample,
    SampledSequence,
    SampleOutput,
    SamplingParams,
)
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.devices import Devices
from tinsmith_jax.sampling_device import SamplingDevice
from tinsmith_jax.sampling_values import BASE_MODEL, PromptTile, SlotInput
from tinsmith_jax.tiles import TILE

MODEL = "drawn"
HAND_OVERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    sequences: int = 64
    prompt: int = 31 * TILE + 1  # the last token is the first that decoding reads
    new_tokens: int = 64
    compared: int = 8  # sequences that the trainer scores

    @property
    def context(self) -> int:
        return self.prompt + self.new_tokens


TOY = Sizes(sequences=4, prompt=2 * TILE + 1, new_tokens=8, compared=2)


def run(options: Options) -> Report:
    start(options)
    note, sizes = Notes(), TOY if options.toy else Sizes()
    flops, bandwidth = matmul_limit(options), bandwidth_limit(options)
    note("limits", matmul_tflops=flops / 1e12, bandwidth_gb_per_s=bandwidth / 1e9)
    settings = {
        "max_context_tokens": -(-sizes.context // TILE) * TILE,
        "decode_slots": sizes.sequences,
        "prefill_tokens": sizes.sequences
        * sizes.prompt,  # all prompts before the first token, so that all decode together
        "max_batch_tokens": 512 if options.toy else 16_384,
    }
    started = time.perf_counter()
    with made_backend(options, settings, samples=True) as backend:
        note(
            "backend",
            ready_s=time.perf_counter() - started,
            device=backend.sampler_capabilities.device,
            peak_gib=peak_gib(),
        )
        measured = Measured(backend, options, sizes, flops, bandwidth, note)
        measured.compile()
        measured.make_adapter()
        asyncio.run(measured.all())
    return measured_again(note.report, flops, matmul_limit(options))


@dataclass(slots=True)
class Dispatches:
    """What the sampler has its device do meanwhile: seconds of each dispatch."""

    device: SamplingDevice
    read: list[tuple[int, float]] = field(default_factory=list)  # tiles
    drawn: list[tuple[int, int, float]] = field(default_factory=list)  # rows, steps
    _patches: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Dispatches":
        prefill, decode = self.device.prefill, self.device.decode

        def timed_prefill(tiles: Sequence[PromptTile]) -> Any:
            started = time.perf_counter()
            found = prefill(tiles)
            self.read.append((len(tiles), time.perf_counter() - started))
            return found

        def timed_decode(slots: SlotInput, num_steps: int) -> Any:
            started = time.perf_counter()
            drawn = decode(slots, num_steps)
            rows = int((slots.left > 0).sum())
            self.drawn.append((rows, len(drawn.tokens_XB), time.perf_counter() - started))
            return drawn

        self._patches.enter_context(mock.patch.object(self.device, "prefill", timed_prefill))
        self._patches.enter_context(mock.patch.object(self.device, "decode", timed_decode))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def step_seconds(self, rows: int) -> float:
        """Return the median of a step with all rows, without the first dispatch."""
        return statistics.median(s / steps for number, steps, s in self.drawn[1:] or self.drawn if number == rows)


@dataclass(slots=True)
class Measured:
    backend: JaxBackend
    options: Options
    sizes: Sizes
    flops: float  # limits, per second
    bandwidth: float
    note: Notes

    def compile(self) -> None:
        sampling = self._device._sampling  # noqa: SLF001
        programs = {
            "decode": sampling.named("decode"),
            "prefill": sampling.named("prefill", self._device.shape.prefill_tiles[-1]),
            "write_adapter": sampling.named("write_adapter", self.options.rank),
        }
        for name, program in programs.items():
            self.note(f"compiling {name}", s=compile_seconds(self.backend, program))

    def make_adapter(self) -> None:
        """Make a model whose B are not zero."""
        lora, rng = LoraConfig(rank=self.options.rank, seed=0), np.random.default_rng(0)
        self.backend.create_model(CreateModel(model_id=MODEL, lora=lora))
        fresh = self.backend.capture_state(MODEL).weights
        weights = {
            name: rng.standard_normal(each.shape, np.float32) * np.float32(0.02) if ".lora_B." in name else each
            for name, each in fresh.items()
        }
        self.backend.restore_state(MODEL, ModelState(lora=lora, weights=weights))

    async def all(self) -> None:
        await self.backend.load_snapshot(self.backend.publish(MODEL, MODEL))
        await self._draw(self._prompts(self._device.shape.prefill_tiles[-1], TILE + 1), 2, MODEL)
        found = await self.drawing()
        self.note("kernels of a decoding step", **kernel_times(partial(self._decode, self._rows(long=True), 1)))
        self.steps()
        await self.hand_over()
        self.against_trainer(found)

    async def drawing(self) -> list[SampledSequence]:
        """Draw all sequences together. Report a token step, and the reading of the prompts."""
        sizes, shape = self.sizes, self.backend.model_config
        started = time.perf_counter()
        with Dispatches(self._device) as dispatches:
            found = await self._draw(self._prompts(sizes.sequences, sizes.prompt), sizes.new_tokens, MODEL)
        took = time.perf_counter() - started
        self._note_step("drawing", dispatches.step_seconds(sizes.sequences), sizes.prompt + sizes.new_tokens / 2)
        tiles, read_s = (sum(each) for each in zip(*dispatches.read, strict=True))
        head = shape.vocab_size * shape.hidden_size
        least = 2 * (linear_parameters(shape) - head) * tiles * TILE / self.flops
        self.note(
            "prompts",
            tokens=tiles * TILE,
            dispatches=len(dispatches.read),
            s=read_s,
            tokens_per_s=tiles * TILE / read_s,
            share_of_matmul_limit=least / read_s,
            with_drawing_s=took,
        )
        return found

    def steps(self) -> None:
        """Measure decoding steps of the device alone: with few tokens before them, and without an adapter."""
        for name, long, adapted in (
            ("long", True, True),
            ("long, no adapter", True, False),
            ("short", False, True),
            ("short, no adapter", False, False),
        ):
            rows = self._rows(long=long, adapted=adapted)
            num_steps = self._device.shape.max_steps
            step = seconds(partial(self._decode, rows, num_steps), self.options.repeats) / num_steps
            self._note_step(name, step, float(rows.positions[0]))

    def _note_step(self, name: str, step: float, tokens_before: float) -> None:
        shape, number = self.backend.model_config, self.sizes.sequences
        width = 4 if self.options.toy else 2
        weights = linear_parameters(shape) * width
        pages = number * tokens_before * 2 * shape.num_layers * shape.kv_size * width
        self.note(
            f"decoding, {name}",
            sequences=number,
            tokens_before=tokens_before,
            s_per_step=step,
            tokens_per_s=number / step,
            share_of_bandwidth_limit=(weights + pages) / self.bandwidth / step,
            peak_gib=peak_gib(),
        )

    def _rows(self, *, long: bool, adapted: bool = True) -> SlotInput:
        """Describe sequences of which the pages hold anything."""
        shape = self._device.shape
        rows = SlotInput.idle(shape)
        rows.left[:], rows.temperature[:], rows.top_p[:] = shape.max_steps, 1.0, 1.0
        rows.tokens[:] = np.arange(shape.num_slots)
        rows.positions[:] = self.sizes.prompt if long else TILE
        rows.tables[:] = 1 + np.arange(rows.tables.size).reshape(rows.tables.shape)
        rows.adapters[:] = 0 if adapted else BASE_MODEL
        return rows

    def _decode(self, rows: SlotInput, num_steps: int) -> None:
        self._device.decode(rows, num_steps)

    async def hand_over(self) -> None:
        """Measure an adapter's way to its first token: one that the trainer has published, and one from the host."""
        lora = LoraConfig(rank=self.options.rank, seed=0)
        weights = dict(self.backend.capture_state(MODEL).weights)
        (prompt,) = self._prompts(1, 1)
        makers: dict[str, Callable[[str], Any]] = {
            "published": lambda name: self.backend.publish(MODEL, name),
            "from the host": lambda name: HostSnapshot(name, lora, weights),
        }
        for kind, make in makers.items():
            loaded, first_token = [], []
            for number in range(HAND_OVERS):
                name = f"{kind}-{number}"
                started = time.perf_counter()
                await self.backend.load_snapshot(make(name))
                loaded.append(time.perf_counter() - started)
                await self._draw([prompt], 1, name)
                first_token.append(time.perf_counter() - started)
                await self.backend.drop_snapshot(name)
            self.note(
                f"hand-over, {kind}",
                loaded_ms=1000 * statistics.median(loaded),
                first_token_ms=1000 * statistics.median(first_token),
            )

    def against_trainer(self, drawn: Sequence[SampledSequence]) -> None:
        """Compare the logprobs of drawn tokens with those that the trainer gives them."""
        prompts = self._prompts(self.sizes.sequences, self.sizes.prompt)
        compared = list(zip(prompts, drawn, strict=True))[: self.sizes.compared]
        data = []
        for prompt, sequence in compared:
            tokens = np.concatenate([prompt, sequence.tokens])
            inputs: dict[str, Array] = {
                "target_tokens": tokens[1:].astype(np.int64),
                "weights": np.ones(len(tokens) - 1, np.float32),
            }
            data.append(Datum(tokens_T=tokens[:-1], loss_inputs=inputs))
        started = time.perf_counter()
        (output,) = self.backend.forward([Forward(model_id=MODEL, data=tuple(data))])
        assert not isinstance(output, Failed), output
        took = time.perf_counter() - started
        theirs = [each["logprobs"][self.sizes.prompt - 1 :] for each in output.loss_fn_outputs]
        ours = np.stack([sequence.logprobs for _, sequence in compared])
        difference = np.abs(ours - np.stack(theirs))
        self.note(
            "sampler against trainer",
            tokens=ours.size,
            mean_logprob=float(ours.mean()),
            mean_difference=float(difference.mean()),
            most=float(difference.max()),
            compiled_and_scored_s=took,
        )

    def _prompts(self, number: int, length: int) -> list[np.ndarray]:
        rng = np.random.default_rng(length)
        return [rng.integers(10, self.backend.model_config.vocab_size, length).astype(np.int32) for _ in range(number)]

    async def _draw(self, prompts: Sequence[np.ndarray], steps: int, snapshot: str | None) -> list[SampledSequence]:
        params = SamplingParams(max_tokens=steps, temperature=1.0, seed=0, stop_at_eos=False)
        ops = [
            Sample(sampling_session_id=f"{index}", snapshot_id=snapshot, prompt_P=prompt, params=params)
            for index, prompt in enumerate(prompts)
        ]
        outputs = await asyncio.gather(*map(self.backend.sample, ops))
        for output in outputs:
            assert isinstance(output, SampleOutput), output
        return [output.sequences[0] for output in outputs if isinstance(output, SampleOutput)]

    @property
    def _device(self) -> SamplingDevice:
        assert isinstance(self.backend.devices, Devices)
        assert self.backend.devices.sampling is not None
        return self.backend.devices.sampling
