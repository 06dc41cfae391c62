"""After the warm-up nothing compiles; before it, what is missing compiles on demand and says so."""

import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from few_programs import FEW_PROGRAMS
from jax._src import compilation_cache, compiler  # no public API returns to the former directory
from jax_harness import LOSSES, add_model, assert_same_bits, assert_same_state, local, make_backend, make_op

from tinsmith import AdamParams, Array, BackendContext, Forward, LoraConfig, ModelState, OptimStep
from tinsmith_jax import runtime
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.buckets import Bucket, Pass
from tinsmith_jax.compilation import Program, Programs
from tinsmith_jax.config import JaxConfig

LIMITS = [
    pytest.param(FEW_PROGRAMS, id="few programs"),
    pytest.param(
        {"max_context_tokens": 200, "max_batch_tokens": 256, "max_lora_rank": 8},
        id="many programs",
        marks=pytest.mark.thorough,
    ),
]

MOST_PROGRAMS = 30  # each takes seconds to compile, and tens of MiB
PASSES: tuple[Pass, ...] = ("gradients", "score")


def _ignore(stage: str, fraction: float | None) -> None:
    del stage, fraction


@pytest.mark.thorough  # for sampling, test_sampler_life.py has a short form
@pytest.mark.slow
@pytest.mark.parametrize("settings", LIMITS)
def test_random_requests_compile_nothing_after_the_warm_up(
    contract_model: Path, jax_cache: Path, settings: Mapping[str, int]
) -> None:
    """100 calls of any lengths, tenants, losses and targets; JAX's own events are counted, not only ours.

    The programs of losses that need sums over sequences are compiled when they are first asked for.
    """
    backend = make_backend(contract_model, jax_cache, warm_up=True, **settings)
    assert local(backend).programs.wait_until_warm(600)
    compiled: list[str] = []

    def count(event: str, duration: float, **_: object) -> None:
        if "compile" in event or "trace" in event:
            compiled.append(f"{event} {duration}")

    rng = np.random.default_rng(0)
    for number in range(10):
        add_model(backend, f"t{number}", LoraConfig(rank=int(rng.integers(1, 9)), seed=number))
    before = local(backend).programs.compile_count
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for call in range(100):
            _random_call(backend, np.random.default_rng(call), settings["max_context_tokens"])
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []
    assert local(backend).programs.compile_count == before
    backend.close()


def _random_call(backend: JaxBackend, rng: np.random.Generator, context: int) -> None:
    ops = []
    for number in rng.choice(10, rng.integers(1, 11), replace=False):
        loss = str(rng.choice(sorted(name for name, spec in LOSSES.items() if not spec.sums)))
        targets = int(rng.integers(2, 9)) if rng.random() < 0.1 else None
        lengths = rng.integers(1, context + 1, rng.integers(1, 3))
        ops.append(make_op(f"t{number}", int(rng.integers(1000)), lengths, loss, targets=targets))
    if rng.random() < 0.3:
        outputs = backend.forward([Forward(model_id=op.model_id, data=op.data, loss_fn=op.loss_fn) for op in ops])
    else:
        outputs = backend.forward_backward(ops)
        backend.optim_step([OptimStep(model_id=op.model_id, adam=AdamParams()) for op in ops])
    for op, output in zip(ops, outputs, strict=True):
        for datum, result in zip(op.data, output.loss_fn_outputs, strict=True):
            assert result["logprobs"].shape == datum.loss_inputs["target_tokens"].shape


def test_the_set_of_programs_is_small(tiny_models: Mapping[str, Path], jax_cache: Path) -> None:
    """With the settings that it ships with on CPU, sampling included, and no two of the same key."""
    backend = make_backend(
        tiny_models["qwen3"],
        jax_cache,
        max_context_tokens=None,
        max_batch_tokens=None,
        max_lora_rank=32,
        max_topk_logprobs=128,
    )
    sampling = local(backend).sampling
    assert sampling is not None
    keys = [program.key for program in (*local(backend).train_programs.all(), *sampling.all_programs())]
    assert len(keys) == len(set(keys))
    assert len(keys) <= MOST_PROGRAMS


def test_room_for_more_adapters_takes_no_more_kernels(contract_model: Path, jax_cache: Path) -> None:
    """XLA:CPU compiles a kernel once if all that differs between its uses are arguments. Slices are the case."""
    train = local(make_backend(contract_model, jax_cache, **FEW_PROGRAMS)).train_programs

    def slices(num_adapters: int) -> int:
        bucket = Bucket(num_tokens=128, num_adapters=num_adapters, num_targets=1, padded_rank=8)
        program: Any = train.gradients(bucket).compile()  # of a partial of jax.stages.Compiled
        return len(re.findall(r" slice\(", program.func.as_text()))

    assert slices(8) == slices(2)


def test_what_holds_everything_comes_first_and_then_the_smallest_of_every_kind(
    tiny_models: Mapping[str, Path], jax_cache: Path
) -> None:
    backend = make_backend(tiny_models["qwen3"], jax_cache, max_context_tokens=512)  # classes 8 and 16
    keys = [program.key for program in local(backend).train_programs.all()]
    small, large = ({program.key for program in programs_for(backend, size, rank=16)} for size in (1, 512))
    assert large <= set(keys[:6])
    assert small <= set(keys[:10])
    gradients = [key for key in keys[: local(backend).train_programs.num_of_first_step] if key[0] == "gradients"]
    assert {key[1].num_tokens for key in gradients} == {512}
    assert [key[1].padded_rank for key in gradients] == [8, 16]


@pytest.mark.parametrize("max_batch_tokens", [256, pytest.param(512, marks=pytest.mark.thorough)])
def test_a_request_during_the_warm_up_takes_a_larger_program_that_is_ready(
    contract_model: Path, jax_cache: Path, max_batch_tokens: int
) -> None:
    """It compiles nothing, and its numbers are those of its own programs, bit for bit."""
    backend = make_backend(contract_model, jax_cache, **{**FEW_PROGRAMS, "max_batch_tokens": max_batch_tokens})
    programs, busy, go_on = local(backend).programs, threading.Event(), threading.Event()
    op, lora = make_op("m", 0, (5, 60)), LoraConfig(rank=4, seed=1)

    def run() -> tuple[Mapping[str, Array], ModelState]:
        add_model(backend, "m", lora, random_B=True)
        (scored,) = backend.forward([Forward(model_id="m", data=op.data)])
        (trained,) = backend.forward_backward([op])
        backend.optim_step([OptimStep(model_id="m", adam=AdamParams())])
        state = backend.capture_state("m")
        backend.unload_model("m")
        return {"scored": scored.loss_fn_outputs[0]["logprobs"], **trained.loss_fn_outputs[0]}, state

    def block() -> object:
        busy.set()
        assert go_on.wait(600)
        return len

    own, ready = (programs_for(backend, num_tokens, rank=8) for num_tokens in (128, max_batch_tokens))
    programs.start_warm_up([*ready, Program("slow", block)])  # type: ignore[arg-type]
    assert busy.wait(600)
    during, state = run()
    assert programs.compile_count == len(ready)
    go_on.set()
    assert programs.wait_until_warm(600)
    backend.close()
    after, expected = run()
    assert programs.compile_count == len({program.key for program in (*own, *ready)}) + 1 > len(ready) + 1
    assert_same_bits(during, after)
    assert_same_state(state, expected)


def programs_for(backend: JaxBackend, num_tokens: int, *, rank: int) -> list[Program]:
    """Return what trains on so many tokens."""
    train = local(backend).train_programs
    sizes = {"num_tokens": num_tokens, "num_adapters": 8, "num_targets": 1, "padded_rank": rank}
    trained, scored = (train.buckets.of(kind).choose(**sizes) for kind in PASSES)
    return [train.gradients(trained), train.step(rank), train.score(scored)]


def test_jax_is_silent_about_devices_that_are_not_there(tiny_models: Mapping[str, Path], jax_cache: Path) -> None:
    make_backend(tiny_models["qwen3"], jax_cache)
    assert not logging.getLogger("jax._src.xla_bridge").isEnabledFor(logging.INFO)


def test_progress_tells_of_loading_and_compiling(contract_model: Path, jax_cache: Path) -> None:
    told: list[tuple[str, float | None]] = []
    context = BackendContext(
        model_name="tiny",
        model_path=contract_model,
        cache_dir=jax_cache,
        losses=LOSSES,
        progress=lambda stage, fraction: told.append((stage, fraction)),
    )
    backend = JaxBackend(JaxConfig.model_validate({"warm_up": False, **FEW_PROGRAMS}), context)
    assert ("loading weights", 1.0) in told
    told.clear()
    add_model(backend, "m", LoraConfig(rank=1, seed=0))
    for _ in range(2):
        backend.forward([Forward(model_id="m", data=make_op("m", 0, (5,)).data)])
    assert told == [("compiling", None)]


@pytest.fixture
def cache_of_its_own(tmp_path: Path, quick_compilation: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for JAX to open. By itself, JAX keeps the first one of the process: the test makes it forget that."""
    del quick_compilation  # the tests compare a program with itself
    monkeypatch.setattr(compilation_cache, "_cache", None)
    for state in ("_cache_initialized", "_cache_checked", "_cache_used"):
        monkeypatch.setattr(compilation_cache, state, False)
    return tmp_path / "cache"


def _start_and_score(model: Path, cache_dir: Path) -> Mapping[str, Array]:
    backend = make_backend(model, cache_dir)
    add_model(backend, "m", LoraConfig(rank=4, seed=1), random_B=True)
    (scored,) = backend.forward([Forward(model_id="m", data=make_op("m", 0, (5, 60)).data)])
    return scored.loss_fn_outputs[0]


_DAMAGE: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: data[:0],
    "the head of it": lambda data: data[:8],
    "half of it": lambda data: data[: len(data) // 2],
    "all but the end": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),  # as a file system may leave it when the power fails
    "a flipped bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "damages",
    [["a flipped bit"], pytest.param([*_DAMAGE], marks=pytest.mark.thorough)],
    ids=["one kind of damage", "every kind of damage"],
)
def test_programs_that_a_power_cut_or_a_disk_has_damaged_are_compiled_again(
    tiny_models: Mapping[str, Path], cache_of_its_own: Path, caplog: pytest.LogCaptureFixture, damages: list[str]
) -> None:
    """With the same numbers, and once.

    JAX alone would warn, compile and leave the damage there at every start, and run most programs with flipped bits.
    """
    compiled = cache_of_its_own / "compiled"

    def start_and_score() -> Mapping[str, Array]:
        return _start_and_score(tiny_models["qwen3"], cache_of_its_own)

    start_and_score()  # and whatever is compiled once in a process
    for entry in compiled.iterdir():
        entry.unlink()
    expected = start_and_score()
    whole = {entry: entry.read_bytes() for entry in compiled.iterdir()}
    assert whole
    for damage in damages:
        for entry, data in whole.items():
            entry.write_bytes(_DAMAGE[damage](data))
        caplog.clear()
        assert_same_bits(start_and_score(), expected)
        assert ["removed the damaged compiled program" in message for message in caplog.messages] == [True] * len(whole)
        caplog.clear()
        assert_same_bits(start_and_score(), expected)
        assert caplog.messages == []
        assert {entry.name for entry in compiled.iterdir()} == {entry.name for entry in whole}


def test_a_second_start_compiles_nothing_even_if_the_directory_has_moved(
    contract_model: Path, cache_of_its_own: Path
) -> None:
    compiled: list[str] = []

    def count(event: str, **_: object) -> None:
        if event.endswith("/cache_misses"):
            compiled.append(event)

    jax.monitoring.register_event_listener(count)
    try:
        _start_and_score(contract_model, cache_of_its_own)
        assert compiled
        moved = cache_of_its_own.with_name("moved")
        cache_of_its_own.rename(moved)
        compilation_cache.reset_cache()
        programs = {entry.name for entry in (moved / "compiled").iterdir()}
        compiled.clear()
        _start_and_score(contract_model, moved)
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_listener(count)
    assert {entry.name for entry in (moved / "compiled").iterdir()} == programs


@pytest.mark.parametrize("process", [0, 1])
def test_every_process_of_a_mesh_keeps_its_programs(
    process: int, cache_of_its_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)  # noqa: SLF001 - what we replace in jax
    monkeypatch.setattr(jax, "process_index", lambda: process)
    runtime.prepare(cache_of_its_own, kernels=False)
    runtime.keep_own_programs()
    jax.jit(lambda: process)()
    assert list((cache_of_its_own / "compiled").iterdir())


def test_the_warm_up_takes_next_what_a_request_does_without() -> None:
    started, go_on = threading.Event(), threading.Event()
    compiled: list[str] = []

    def program(name: str) -> Program:
        def compile_slowly() -> Callable[..., object]:
            if name == "slow":
                started.set()
                assert go_on.wait(600)
            compiled.append(name)
            return len

        return Program(name, compile_slowly)

    small, large = program("small"), program("large")
    programs = Programs(_ignore)
    programs.start_warm_up([large, program("slow"), program("medium"), small])
    assert started.wait(600)
    assert [programs.pick([small, large]) for _ in range(2)] == [1, 1]
    assert programs.pick([large, small]) == 0
    go_on.set()
    assert programs.wait_until_warm(600)
    assert compiled == ["large", "slow", "small", "medium"]


def test_a_request_waits_for_a_larger_program_that_is_being_compiled() -> None:
    """Its own would be ready later, and the compiler would do both at once."""
    started, go_on = threading.Event(), threading.Event()

    def compile_slowly() -> object:
        started.set()
        assert go_on.wait(600)
        return len

    small, large = Program("small", lambda: len), Program("large", compile_slowly)  # type: ignore[arg-type]
    programs = Programs(_ignore)
    programs.start_warm_up([large, small])
    assert started.wait(600)
    assert programs.pick([small, large]) == 1
    go_on.set()
    assert programs.wait_until_warm(600)


def test_logs_name_what_a_request_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket(num_tokens=128, num_adapters=8, num_targets=1, padded_rank=16)
    programs = Programs(_ignore)
    with caplog.at_level(logging.INFO, "tinsmith_jax"):
        programs.get(Program(("gradients", bucket, False), lambda: len))
        programs.start_warm_up([Program(("step", 16), lambda: len)])
        assert programs.wait_until_warm(600)
    waited, began, ended = caplog.messages
    assert waited == "compiling gradients of 128 tokens, 8 adapters, 1 targets per token, rank 16"
    assert began == "compiling 1 programs in the background, the likely ones first"
    assert ended.startswith("compiled 1 programs in ")


def test_two_askers_wait_for_one_compilation() -> None:
    started, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def compile_slowly() -> object:
        started.set()
        assert go_on.wait(600)
        made.append(1)
        return len

    programs = Programs(_ignore)
    program = Program("key", compile_slowly)  # type: ignore[arg-type]
    programs.start_warm_up([program])
    assert started.wait(600)
    threading.Timer(0, go_on.set).start()
    assert programs.get(program) is len
    assert programs.wait_until_warm(600)
    assert (made, programs.compile_count) == ([1], 1)


def test_the_warm_up_begins_nothing_while_a_request_waits() -> None:
    began = {name: threading.Event() for name in ("first", "wanted", "other")}
    first_may_end = threading.Event()
    beside: list[bool] = []

    def first() -> object:
        began["first"].set()
        assert began["wanted"].wait(600)
        first_may_end.set()
        return len

    def wanted() -> object:
        began["wanted"].set()
        assert first_may_end.wait(600)
        beside.append(began["other"].wait(0.2))
        return len

    def other() -> object:
        began["other"].set()
        return len

    programs = Programs(_ignore)
    programs.start_warm_up([Program("first", first), Program("other", other)])  # type: ignore[arg-type]
    assert began["first"].wait(600)
    programs.get(Program("wanted", wanted))  # type: ignore[arg-type]
    assert programs.wait_until_warm(600)
    assert beside == [False]
    assert began["other"].is_set()


def test_a_failed_compilation_is_tried_again() -> None:
    outcomes = iter([ValueError("no"), len])

    def compile_once() -> object:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    programs = Programs(_ignore)
    program = Program("key", compile_once)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no"):
        programs.get(program)
    assert programs.get(program) is len


@pytest.mark.parametrize(("alone", "chosen"), [(True, 1), (False, 0)])
def test_processes_of_a_mesh_choose_alike_during_the_warm_up(alone: bool, chosen: int) -> None:
    """What is ready in one is not what is ready in another."""
    started, go_on = threading.Event(), threading.Event()

    def compile_slowly() -> object:
        started.set()
        assert go_on.wait(600)
        return len

    small, large = Program("small", compile_slowly), Program("large", lambda: len)  # type: ignore[arg-type]
    programs = Programs(_ignore, alone=alone)
    programs.start_warm_up([large, small])
    assert started.wait(600)
    assert programs.pick([small, large]) == chosen
    go_on.set()
    programs.close()
    assert programs.pick([small, large]) == 0
