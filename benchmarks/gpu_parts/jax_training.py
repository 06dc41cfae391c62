"""The jax backend on one GPU: what compiling costs, and whole steps of one and of eight tenants.

The weights are random, and made on the device. Sequences have 100 to 2000 tokens, and fill one micro-batch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gpu_parts.common import Notes, Options, Report, linear_parameters, measured_again, operations
from gpu_parts.jax_common import (
    bandwidth_limit,
    compile_seconds,
    compiled_with,
    kernel_times,
    made_backend,
    matmul_limit,
    peak_gib,
    seconds,
    start,
)  # fmt: skip
from tinsmith.operations import (
    AdamParams,
    CreateModel,
    Failed,
    ForwardBackward,
    LoraConfig,
    OptimStep,
)
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.buckets import Bucket
from tinsmith_jax.compilation import Programs
from tinsmith_jax.devices import Devices
from tinsmith_jax.tiles import MAX_ADAPTERS, TILE
from tinsmith_jax.train_step import TrainPrograms

TENANTS = (1, MAX_ADAPTERS)
PACKINGS = 5  # after the warm-up; none may compile anything
OTHERS: dict[str, dict[str, object]] = {
    "XLA's own options": {"xla_gpu_enable_triton_gemm": True},
    "no autotuning": {"xla_gpu_enable_triton_gemm": True, "xla_gpu_autotune_level": 0},
}
"""Compiler options to compare with."""


def run(options: Options) -> Report:
    start(options)
    note = Notes()
    limit = matmul_limit(options)
    note("limits", matmul_tflops=limit / 1e12, bandwidth_gb_per_s=bandwidth_limit(options) / 1e9)
    settings = {"max_batch_tokens": 512, "max_context_tokens": 512} if options.toy else {}
    started = time.perf_counter()
    with made_backend(options, settings, samples=False) as backend:
        limits = backend.limits
        note(
            "backend",
            ready_s=time.perf_counter() - started,
            device=backend.trainer_capabilities.device,
            dtype=limits.dtype,
            max_batch_tokens=limits.max_batch_tokens,
            recompute=limits.recompute,
            max_models=backend.trainer_capabilities.max_models,
        )
        tokens = min(options.tokens, limits.max_batch_tokens)
        least = 4 * linear_parameters(backend.model_config) / limit
        measured = Measured(backend, options, tokens, least, note)
        for tenants in TENANTS:
            measured.tenants(tenants)
        measured.packings()
        measured.kernels()
        measured.other_options()
        measured.second_start()
    return measured_again(note.report, limit, matmul_limit(options))


@dataclass(frozen=True, slots=True)
class Measured:
    backend: JaxBackend
    options: Options
    tokens: int  # of a micro-batch, with what pads sequences to whole tiles
    least_s_per_token: float  # forward and the input's gradient; a frozen base has none of its own
    note: Notes

    def tenants(self, number: int) -> None:
        """Measure forward_backward and optim_step of so many tenants together."""
        models, repeats = self._models(number), self.options.repeats
        programs = {
            "not_finite": self._train.not_finite(self.options.rank),
            "gradients": self._train.gradients(self._bucket(number)),
            "step": self._train.step(self.options.rank),
        }
        took = {name: compile_seconds(self.backend, program) for name, program in programs.items()}
        self.note(f"compiling, tenants: {number}", **took)
        ops = self._batch(models, seed=0)
        tokens = num_tokens(ops)
        passes = seconds(lambda: self._run(ops), repeats)
        self.note(
            f"forward_backward, tenants: {number}",
            tokens=tokens,
            s=passes,
            share_of_matmul_limit=tokens * self.least_s_per_token / passes,
            peak_gib=peak_gib(),
        )
        adam = [OptimStep(model_id=model_id, adam=AdamParams()) for model_id in models]
        steps = seconds(lambda: self.backend.optim_step(adam), repeats)
        self.note(
            f"optim_step, tenants: {number}", s=steps, tokens_per_s=tokens / (passes + steps), peak_gib=peak_gib()
        )

    def packings(self) -> None:
        """Run batches of ever new lengths, and count the programs that they compile, which should be 0."""
        models, number = self._models(TENANTS[-1]), 1 if self.options.toy else PACKINGS
        before = self._devices.programs.compile_count
        for seed in range(1, number + 1):
            self._run(self._batch(models, seed=seed))
        self.note("new packings", packings=number, compiled=self._devices.programs.compile_count - before)

    def kernels(self) -> None:
        for tenants in TENANTS:
            ops = self._batch(self._models(tenants), seed=0)
            self.note(f"kernels, tenants: {tenants}", **kernel_times(partial(self._run, ops)))

    def other_options(self) -> None:
        """Compile the pass of one tenant with other options, and run it."""
        ops = self._batch(self._models(1), seed=0)
        for name, compiler_options in OTHERS.items():
            with compiled_with(compiler_options):
                took = self._compile_again()
                self.note(f"compiling, {name}", gradients=took)
                self.note(f"forward_backward, {name}", s=seconds(lambda: self._run(ops), 2))

    def second_start(self) -> None:
        """Compile the pass of one tenant again: the compiler's result is on the disk."""
        self.note("compiling at a second start", gradients=self._compile_again())

    def _compile_again(self) -> float:
        self._devices.training._programs = self._devices.programs = Programs(lambda *_: None)  # noqa: SLF001
        return compile_seconds(self.backend, self._train.gradients(self._bucket(1)))

    def _models(self, number: int) -> list[str]:
        models = [f"model-{index}" for index in range(number)]
        for index, model_id in enumerate(models):
            if model_id not in self.backend.models:
                lora = LoraConfig(rank=self.options.rank, seed=index)
                self.backend.create_model(CreateModel(model_id=model_id, lora=lora))
        return models

    def _bucket(self, tenants: int) -> Bucket:
        return self.backend._buckets.of("gradients").choose(  # noqa: SLF001
            num_tokens=self.tokens, num_adapters=tenants, num_targets=1, padded_rank=self.options.rank
        )

    def _batch(self, models: Sequence[str], *, seed: int) -> list[ForwardBackward]:
        return operations(models, self.backend.model_config.vocab_size, self.tokens, seed=seed, tile=TILE)

    def _run(self, ops: Sequence[ForwardBackward]) -> None:
        for output in self.backend.forward_backward(ops):
            assert not isinstance(output, Failed), output
            assert np.isfinite(output.metrics["loss:sum"]), output.metrics

    @property
    def _devices(self) -> Devices:
        assert isinstance(self.backend.devices, Devices)
        return self.backend.devices

    @property
    def _train(self) -> TrainPrograms:
        return self._devices.train_programs


def num_tokens(ops: Sequence[ForwardBackward]) -> int:
    return sum(len(datum.tokens_T) for op in ops for datum in op.data)
