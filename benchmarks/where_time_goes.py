"""Where the time of an operation goes: its stages on the host and on the device, one operation at a time.

    python benchmarks/where_time_goes.py [--backend jax|toy] [--model tiny|small|medium] [--rounds 20] [--json FILE]
        [--only OPERATION ...]

Server, engine and client run in one process, so that one clock sees all of them. They share the interpreter, but not
the moment: while one works on a lone operation, the others wait for it. Each stage is a function whose calls are
timed. "starts" counts from the client's call; "CPU" is what the stage's own thread computed, and is missing where a
stage waits for other threads. Indented stages are parts of the one above; what no stage covers is the SDK, HTTP and
the way between threads.

With the jax backend, the device's part is compared with what is measured here: the rate of a large product of matrices
in float32, the rate at which memory is read, and the time of this model's own products when XLA computes nothing else.
"""

import argparse
import functools
import inspect
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import tinker
from comparison.shapes import SHAPES
from comparison.workbench import Workbench, adam, done, published, sample
from tinker import types

from tinsmith.processes.engine_child import with_pages_that_stay
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import running_server
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

_RANK: Final = 8
_BATCH, _LENGTH = 8, 128
_SLOTS_TOKENS: Final = 64  # tokens of each sampled sequence
_WARM_UP_S: Final = 4.0  # in which a program is compiled, beside calls that use a larger one until it is ready
_TOY_TOKENS: Final = 64

# what is timed: where it is defined (or, for functions that are imported by name, used), what it is called here, depth
STAGES: Final = (
    ("tinsmith.server.submitting:_prepared", "parse, check, encode", 0),
    ("tinsmith.sql_store.store:SqlStore.submit", "submit, until durable", 0),
    ("tinsmith.engine.claims:Claims.claim", "claim", 0),
    ("tinsmith.engine.claims:Claims._decoded", "decode", 1),
    ("tinsmith.engine.training:TrainingQueue.take", "plan", 0),
    ("tinsmith.engine.models:Models.run_batch", "run, with the way to its thread", 0),
    ("tinsmith.engine.model_operations:ModelOperations.run", "run what reads or writes files", 0),
    ("tinsmith.engine.models:Models.publish", "publish", 1),
    ("tinsmith.engine.probes:Probes.compare", "check consistency, behind the answer", 0),
    ("tinsmith.engine.sampling:Sampling._sample", "sample", 0),
    ("tinsmith_jax.trainer:pack", "pack", 1),
    ("tinsmith_jax.training_device:TrainingDevice.gradients", "device: gradients", 1),
    ("tinsmith_jax.training_device:TrainingDevice.score", "device: score", 1),
    ("tinsmith_jax.training_device:TrainingDevice.step", "device: optimizer step", 1),
    ("tinsmith_jax.sampling_device:SamplingDevice.write_adapter", "device: write adapter", 1),
    ("tinsmith_jax.sampling_device:SamplingDevice.prefill", "device: prefill", 1),
    ("tinsmith_jax.sampling_device:SamplingDevice.decode", "device: decode", 1),
    ("tinsmith.engine.recorder:Recorder._record", "record, until durable", 0),
    ("tinsmith.server.results:_read", "answer", 0),
    ("tinsmith.sql_store.group_commit:commit_durably", "commits, of all stages", 0),
)
_JAX: Final = "tinsmith_jax"


@dataclass(frozen=True, slots=True)
class Span:
    stage: str
    started_s: float
    seconds: float
    cpu_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A stage, in medians over the rounds."""

    stage: str
    calls: float
    starts_ms: float
    takes_ms: float
    cpu_ms: float | None


class Trace:
    """Times functions while it is installed. Its list is appended to by several threads."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def installed(self, *, with_jax: bool) -> Iterator[None]:
        originals = []
        for place, stage, _ in STAGES:
            if with_jax or not place.startswith(_JAX):
                owner, name = find(place)
                originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, self._timed(getattr(owner, name), stage))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, function: Any, stage: str) -> Any:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def waited(*args: Any, **options: Any) -> Any:
                started = time.perf_counter()
                try:
                    return await function(*args, **options)
                finally:
                    self.spans.append(Span(stage, started, time.perf_counter() - started, None))

            return waited

        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            started, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.spans.append(Span(stage, started, time.perf_counter() - started, time.thread_time() - cpu))

        return called


def find(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    return owner, name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="jax", choices=["jax", "toy"])
    parser.add_argument("--model", default="tiny", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", metavar="OPERATION", help="those whose names begin so; default all")
    options = parser.parse_args()
    _have_huge_pages()
    shape = SHAPES[options.model]
    found: dict[str, Any] = {"backend": options.backend, "model": options.model, "operations": {}}
    trace, with_jax = Trace(), options.backend == "jax"
    with tempfile.TemporaryDirectory() as directory, trace.installed(with_jax=with_jax):
        model = _model(Path(directory) / "model", shape, options.backend)
        with running_server(Path(directory) / "data", models=[model]) as server:
            bench = Workbench(
                url=server.url,
                base_model=model.name,
                vocab_size=shape.vocab_size if with_jax else _TOY_TOKENS,
                rank=_RANK,
            )
            for name, call in _operations(bench).items():
                if options.only and not name.startswith(tuple(options.only)):
                    continue
                total_ms, rows = _measure(trace, call, options.rounds)
                found["operations"][name] = {"total_ms": total_ms, "stages": [asdict(row) for row in rows]}
                _show(name, total_ms, rows)
            for service in bench.services:
                done(service.close("success"))
        if with_jax:  # while there is the directory in which JAX keeps programs
            found["bounds"] = _bounds(shape, found["operations"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _have_huge_pages() -> None:
    """Start this program again with the setting of the C library that a server's engines have."""
    if "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = with_pages_that_stay("")
        os.execv(sys.executable, [sys.executable, *sys.argv])


def _model(directory: Path, shape: TinyShape, backend: str) -> ModelSettings:
    if backend == "toy":
        return ModelSettings(name="toy", backend=PluginSection(plugin="toy"))
    write_tiny_model(directory, shape)
    section = PluginSection.model_validate({"plugin": "jax", "warm_up": False})
    return ModelSettings(name="model", path=directory, backend=section)


def _operations(bench: Workbench) -> dict[str, Callable[[], object]]:
    training, data = bench.tenant(), bench.batch(0, [_LENGTH] * _BATCH)
    prompt, params = bench.tokens(1, 32), adam(0.0)
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(adam()).result()
    sampler = published(training)
    return {
        "optim_step": lambda: training.optim_step(params).result(),
        f"forward {_BATCH}x{_LENGTH}": lambda: training.forward(data, "cross_entropy").result(),
        f"forward_backward {_BATCH}x{_LENGTH}": lambda: training.forward_backward(data, "cross_entropy").result(),
        "sample 1 token": lambda: sample(sampler, prompt, 1).result(),
        f"sample 16x{_SLOTS_TOKENS}": lambda: sample(sampler, prompt, _SLOTS_TOKENS, number=16).result(),
        "compute_logprobs 32": lambda: sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result(),
        "weight sync": lambda: published(training),
        "RL iteration, 4 prompts, 4x32 each": lambda: _iteration(bench, training),
    }


def _iteration(bench: Workbench, training: tinker.TrainingClient) -> None:
    sampler = published(training)
    futures = [sample(sampler, bench.tokens(seed, 24), 32, number=4, seed=seed) for seed in range(4)]
    for future in futures:
        future.result()
    passed = training.forward_backward(bench.batch(2, [56] * 16), "cross_entropy")
    stepped = training.optim_step(adam())
    passed.result()
    stepped.result()


def _measure(trace: Trace, call: Callable[[], object], rounds: int) -> tuple[float, list[Row]]:
    """Return the median of the whole in milliseconds, and the stages in the order in which they start."""
    started = time.monotonic()
    while time.monotonic() - started < _WARM_UP_S:
        call()
    totals_s, seen = [], []
    for _ in range(rounds):
        trace.spans.clear()
        started = time.perf_counter()
        call()
        totals_s.append(time.perf_counter() - started)
        seen.append((started, [span for span in trace.spans if span.started_s >= started]))
    stages = [stage for _, stage, _ in STAGES if any(span.stage == stage for _, spans in seen for span in spans)]
    return 1000 * statistics.median(totals_s), [_row(stage, seen) for stage in stages]


def _row(stage: str, seen: Sequence[tuple[float, Sequence[Span]]]) -> Row:
    of_rounds = [(started, own) for started, spans in seen if (own := [span for span in spans if span.stage == stage])]
    cpu_s = [sum(span.cpu_s for span in own if span.cpu_s is not None) for _, own in of_rounds]
    return Row(
        stage=stage,
        calls=statistics.median(len(own) for _, own in of_rounds),
        starts_ms=1000 * statistics.median(own[0].started_s - started for started, own in of_rounds),
        takes_ms=1000 * statistics.median(sum(span.seconds for span in own) for _, own in of_rounds),
        cpu_ms=None if of_rounds[0][1][0].cpu_s is None else 1000 * statistics.median(cpu_s),
    )


def _show(name: str, total_ms: float, rows: Sequence[Row]) -> None:
    depths = {stage: depth for _, stage, depth in STAGES}
    print(f"\n{name}: {total_ms:.1f} ms\n  {'stage':40} calls  starts    takes      CPU  ms")
    for row in rows:
        cpu = "" if row.cpu_ms is None else f"{row.cpu_ms:8.2f}"
        stage = "  " * depths[row.stage] + row.stage
        print(f"  {stage:40} {row.calls:5.0f} {row.starts_ms:7.2f} {row.takes_ms:8.2f} {cpu}", flush=True)


def _bounds(shape: TinyShape, operations: dict[str, Any]) -> dict[str, float]:
    """Print what the device's stages take beside what the machine's rates allow."""
    from tinsmith_jax import native

    product, read = _product_flops_per_s(), _read_bytes_per_s()
    print(
        f"\nthis machine: {product / 1e9:.0f} GFLOP/s in a product of float32, {read / 1e9:.1f} GB/s read from memory"
    )
    found = {"flops_per_s": product, "bytes_per_s": read}
    if shape.dtype == "bfloat16" and native.multiplies_bfloat16():
        product *= 2  # one instruction does twice as much in the same time
    parameters = _matrix_parameters(shape)
    forward_ms = 1000 * 2 * parameters * _BATCH * _LENGTH / product
    num_bytes = parameters * (2 if shape.dtype == "bfloat16" else 4)
    draws_ms = 1000 * _SLOTS_TOKENS * max(2 * parameters * 16 / product, num_bytes / read)
    rows = {
        (f"forward {_BATCH}x{_LENGTH}", "device: score"): forward_ms,
        (f"forward_backward {_BATCH}x{_LENGTH}", "device: gradients"): 2 * forward_ms,  # the base is frozen
        (f"sample 16x{_SLOTS_TOKENS}", "device: decode"): draws_ms,
    }
    print("bounds count the base's matrices alone, without attention and adapters")
    for (operation, stage), bound_ms in rows.items():
        for each in operations.get(operation, {"stages": ()})["stages"]:
            if each["stage"] == stage:
                alone_ms = _products_ms(shape, operation)
                found[operation] = bound_ms / each["takes_ms"]
                found[f"{operation}, products alone, ms"] = alone_ms
                print(
                    f"  {operation:28} {stage:20} {each['takes_ms']:8.1f} ms, bound {bound_ms:8.1f} ms, "
                    f"products alone {alone_ms:8.1f} ms"
                )
    return found


def _products_ms(shape: TinyShape, operation: str) -> float:
    """Return how long the operation's products take by themselves, of as many rows, one after the other."""
    import jax

    draws = operation.startswith("sample")
    x_TH, layers, head_VH = _random_matrices(shape, num_rows=16 if draws else _BATCH * _LENGTH)
    queries, inner = shape.num_heads * shape.head_dim, shape.intermediate_size

    def forward(x_TH: Any) -> Any:
        for qkv, o, gate_up, down in layers:
            x_TH = x_TH + (x_TH @ qkv)[:, :queries] @ o
            x_TH = x_TH + (x_TH @ gate_up)[:, :inner] @ down
        return x_TH @ head_VH.T

    def with_gradients(x_TH: Any) -> Any:
        logits_TV, pull_back = jax.vjp(forward, x_TH)
        return pull_back(logits_TV)

    run = jax.jit(with_gradients if operation.startswith("forward_backward") else forward)
    jax.block_until_ready(run(x_TH))
    seconds = _fastest_s(lambda: jax.block_until_ready(run(x_TH)), 20)
    return 1000 * seconds * (_SLOTS_TOKENS if draws else 1)


def _random_matrices(shape: TinyShape, num_rows: int) -> tuple[Any, Sequence[tuple[Any, ...]], Any]:
    """Return inputs [T, H], each layer's matrices [in, out], and the head [V, H]."""
    import jax

    keys = iter(jax.random.split(jax.random.key(0), 4 * shape.num_layers + 2))

    def matrix(*size: int) -> Any:
        return jax.random.normal(next(keys), size) / size[0]

    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, both = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
    layers = [
        (matrix(hidden, queries + both), matrix(queries, hidden), matrix(hidden, 2 * inner), matrix(inner, hidden))
        for _ in range(shape.num_layers)
    ]
    return matrix(num_rows, hidden), layers, matrix(shape.vocab_size, hidden)


def _matrix_parameters(shape: TinyShape) -> int:
    """Return those of all products: the layers' matrices, and the head."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    return shape.num_layers * layer + shape.vocab_size * shape.hidden_size


def _product_flops_per_s(size: int = 1024, repeats: int = 20) -> float:
    import jax

    a = jax.random.normal(jax.random.key(0), (size, size))
    multiply = jax.jit(lambda x: x @ x)
    multiply(a).block_until_ready()
    return 2 * size**3 / _fastest_s(lambda: multiply(a).block_until_ready(), repeats)


def _read_bytes_per_s(mib: int = 256, repeats: int = 5) -> float:
    numbers = np.ones(mib << 18, np.float32)
    return numbers.nbytes / _fastest_s(numbers.max, repeats)


def _fastest_s(call: Callable[[], object], repeats: int) -> float:
    times_s = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - started)
    return min(times_s)


if __name__ == "__main__":
    sys.exit(main())
