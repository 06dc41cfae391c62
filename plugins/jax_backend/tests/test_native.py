"""The kernels in C++: against XLA's, with equal bits in any company, and on machines that cannot compile them."""

import asyncio
import errno
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax_harness import add_model, assert_same_state, local, make_backend, make_op, sampling_of
from safetensors.numpy import load_file, save_file
from sampling_harness import assert_same_sequences, make_sample, prompt, sample, trainer_logprobs

from tinsmith import LoraConfig, ModelState, Sample, SampleOutput
from tinsmith_checkpoints.huggingface import save_as_published, tiny_causal_lm
from tinsmith_checkpoints.huggingface.int8 import Int8
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_jax import head, native, runtime
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.families import read_config
from tinsmith_jax.native import library, loading
from tinsmith_jax.sampling_values import Drawn, PromptTile, SlotInput

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

# With norms of heads and a tied head, and with neither; with matrices of bfloat16, which are widened.
KINDS = ("qwen3", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("llama3", "narrow")))
BFLOAT16 = ("bfloat16", pytest.param("bfloat16_untied", marks=pytest.mark.thorough))
CONTEXT = {"max_position_embeddings": 320}
HYBRIDS: Mapping[str, Mapping[str, int]] = {
    "hybrid": {},
    "odd_hybrid": {"linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_conv_kernel_dim": 3},
}
"""By which XLA trains and the kernels sample: heads of whole vectors, and of parts of one."""
LORAS = {"a": LoraConfig(rank=3, seed=1, alpha=9), "b": LoraConfig(rank=16, seed=2)}
LIMITS: Mapping[str, Any] = {"max_context_tokens": 320, "max_batch_tokens": 512, "decode_slots": 4}


@pytest.fixture(scope="module")
def models(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sizes of `narrow` are multiples of a vector, but not of the kernels' blocks. Those of others suit bfloat16."""
    directory = tmp_path_factory.mktemp("models")
    shape = TinyShape(dtype="bfloat16", hidden_size=96, intermediate_size=224, num_layers=2, vocab_size=4098)
    write_tiny_model(directory / "narrow", replace(shape, hidden_size=80, intermediate_size=208, vocab_size=4112))
    write_tiny_model(directory / "bfloat16", shape)
    write_tiny_model(directory / "bfloat16_untied", replace(shape, tied=False, family="llama"))
    for name, sizes in HYBRIDS.items():
        save_as_published(tiny_causal_lm("Qwen3_5ForCausalLM", {**CONTEXT, **sizes}), directory / name)
    return {**tiny_models, **{path.name: path for path in directory.iterdir()}}


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, models: dict[str, Path], jax_cache: Path
) -> Iterator[tuple[JaxBackend, JaxBackend]]:
    """Backends of one model, with the kernels in C++ and without."""
    settings = {**LIMITS, "dtype": "float32"}
    backends = [make_backend(models[request.param], jax_cache, **settings, kernels=k) for k in ("device", "reference")]
    for backend in backends:
        for name, lora in LORAS.items():
            add_model(backend, name, lora, random_B=True)
    assert backends[0].limits.kernels.native
    assert not backends[1].limits.kernels.native
    yield backends[0], backends[1]
    for backend in backends:
        backend.close()


def gradients(backend: JaxBackend, ops: list[Any]) -> dict[str, ModelState]:
    """Add the gradients of the operations to none; return the states."""
    for name in LORAS:
        state = backend.capture_state(name)
        backend.restore_state(name, ModelState(lora=state.lora, weights=state.weights))
    backend.forward_backward(ops)
    return {name: backend.capture_state(name) for name in LORAS}


@pytest.mark.usefixtures("quick_compilation")
def test_gradients_are_those_of_xla(pair: tuple[JaxBackend, JaxBackend]) -> None:
    ops = [make_op("a", 1, [5, 150]), make_op("b", 2, [64, 1]), make_op("a", 3, [65])]  # in one pass
    mine, reference = (gradients(backend, ops) for backend in pair)
    for name in LORAS:
        for path, expected in reference[name].gradients.items():
            scale = float(np.abs(expected).max())
            assert scale > 0 or "lora_A" in path
            np.testing.assert_allclose(mine[name].gradients[path], expected, atol=1e-5 * max(scale, 1), err_msg=path)
    for found, expected in zip(*(backend.forward(ops) for backend in pair), strict=True):
        for left, right in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(left["logprobs"], right["logprobs"], atol=1e-4)


@pytest.mark.usefixtures("quick_compilation")
async def test_samples_are_those_of_xla(pair: tuple[JaxBackend, JaxBackend]) -> None:
    await assert_same_samples(pair)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", ["odd_hybrid", pytest.param("hybrid", marks=pytest.mark.thorough)])
async def test_samples_of_a_hybrid_are_those_of_xla(models: dict[str, Path], jax_cache: Path, kind: str) -> None:
    """XLA trains it."""
    backends = [make_backend(models[kind], jax_cache, **LIMITS, kernels=k) for k in ("device", "reference")]
    for backend in backends:
        for name, lora in LORAS.items():
            add_model(backend, name, lora, random_B=True)
    assert [backend.limits.native for backend in backends] == [True, False]
    assert not backends[0].limits.kernels.native
    await assert_same_samples(backends)
    for backend in backends:
        backend.close()


async def assert_same_samples(backends: Sequence[JaxBackend]) -> None:
    """Tokens, as random numbers are the same, and all logprobs that can be asked for."""
    for backend in backends:
        for name in LORAS:
            await backend.load_snapshot(backend.publish(name, name))
    for number, (length, adapter) in enumerate([(1, None), (64, "a"), (150, "b"), (65, "a")]):
        for given in ({"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 9, "top_p": 0.8}):
            asked = {"max_tokens": 9, "seed": number, "prompt_logprobs": True, "topk_sample_logprobs": 3, **given}
            op = make_sample(prompt(length, seed=length), adapter, num_samples=2, **asked)
            found, expected = [await sample(backend, op) for backend in backends]
            np.testing.assert_allclose(found.prompt_logprobs, expected.prompt_logprobs, atol=1e-4)
            for left, right in zip(found.sequences, expected.sequences, strict=True):
                assert left.tokens.tolist() == right.tokens.tolist()
                np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-4)
                assert left.top_logprobs is not None
                assert right.top_logprobs is not None
                assert left.top_logprobs.token_ids.tolist() == right.top_logprobs.token_ids.tolist()


async def test_a_model_of_bfloat16_is_kept_once_and_computes_the_bits_of_float32(
    models: dict[str, Path], jax_cache: Path, tmp_path: Path
) -> None:
    """It took three times its size: as float32, and once more as it is, for products of few rows."""
    shutil.copy(models["narrow"] / "config.json", tmp_path)
    [file] = models["narrow"].glob("*.safetensors")
    weights = load_file(file)
    save_file({name: array.astype(np.float32) for name, array in weights.items()}, tmp_path / "model.safetensors")
    ops = [make_op("a", 1, [5, 64, 70]), make_op("b", 2, [130, 1])]  # in one pass
    states, samples, sizes = [], [], []
    for directory in (models["narrow"], tmp_path):
        backend = make_backend(directory, jax_cache, **LIMITS, dtype="float32")
        sizes.append(sum(array.nbytes for array in jax.tree.leaves(local(backend).training.base)))
        for name, lora in LORAS.items():
            add_model(backend, name, lora, random_B=True)
            await backend.load_snapshot(backend.publish(name, name))
        states.append(gradients(backend, ops))
        asked = make_sample(prompt(70), "a", num_samples=3, max_tokens=9, prompt_logprobs=True)
        samples.append(await sample(backend, asked))
        backend.close()
    stored = sum(array.nbytes for array in weights.values())
    head_again = weights["model.embed_tokens.weight"].nbytes  # which is the embedding, and has a name of its own
    assert sizes[0] - head_again < 1.05 * stored  # norms are float32
    assert sizes[1] > 1.9 * sizes[0]
    for name in LORAS:
        assert_same_state(*(each[name] for each in states))
    assert_same_sequences(*samples)
    np.testing.assert_array_equal(samples[0].prompt_logprobs, samples[1].prompt_logprobs)


@pytest.mark.parametrize("kind", BFLOAT16)
async def test_bfloat16_is_near_float32(models: dict[str, Path], jax_cache: Path, kind: str) -> None:
    """Of all modules: what rounding changes is small, in any direction, and the same in training as in sampling.

    The layers round alike in both. If they did not, a quarter of all logprobs would differ by 1e-5 and more, as a
    number that is rounded otherwise changes every later token that attends to it.
    """
    exact, rounding = (make_backend(models[kind], jax_cache, **LIMITS, dtype=d) for d in ("float32", "bfloat16"))
    assert rounding.limits.kernels.native
    assert rounding.trainer_capabilities.isolation == "bitwise"
    for backend in (exact, rounding):
        for name, lora in LORAS.items():
            add_model(backend, name, lora, random_B=True)
            await backend.load_snapshot(backend.publish(name, name))
    ops = [make_op("a", 1, [5, 150]), make_op("b", 2, [64, 1]), make_op("a", 3, [65], targets=3)]
    expected, found = (gradients(backend, ops) for backend in (exact, rounding))
    for name in LORAS:
        for path, right in expected[name].gradients.items():
            error = np.linalg.norm(found[name].gradients[path] - right)
            assert 0 < error < 0.02 * np.linalg.norm(right) or not right.any(), path
    differences = []
    for seed in range(12):
        name, tokens = "ab"[seed % 2], prompt(130, seed=seed)
        asked = make_sample(tokens, name, max_tokens=20, seed=seed, prompt_logprobs=True)
        given = await sample(rounding, asked)
        [drawn], read = given.sequences, given.prompt_logprobs[1:]
        right = (await sample(exact, asked)).prompt_logprobs[1:]
        assert 0 < np.abs(read - right).mean() < 0.02
        of_training = trainer_logprobs(rounding, name, np.concatenate([tokens, drawn.tokens]).astype(np.int32))
        differences.append(np.abs(np.concatenate([read, drawn.logprobs]) - of_training))
    found_differences = np.concatenate(differences)
    assert np.mean(found_differences > 1e-5) < 0.01  # XLA computes the norm before the head in training
    assert found_differences.max() < 0.01
    for backend in (exact, rounding):
        backend.close()


@pytest.mark.parametrize(
    ("kind", "settings", "dtype"),
    [
        ("bfloat16", {}, "bfloat16"),
        ("bfloat16", {"dtype": "float32"}, "float32"),
        ("bfloat16", {"kernels": "reference"}, "float32"),
        ("bfloat16", {"recompute": True}, "float32"),
        ("narrow", {}, "float32"),  # of sizes that the kernels do not multiply in bfloat16
        ("qwen3", {}, "float32"),  # a model of float32
        ("int8", {}, "float32"),
    ],
)
def test_a_model_of_bfloat16_is_computed_as_such(
    models: dict[str, Path], jax_cache: Path, kind: str, settings: dict[str, Any], dtype: str
) -> None:
    assert native.load(jax_cache)
    if not native.multiplies_bfloat16():
        pytest.skip("this CPU has no instruction for products of bfloat16")
    model = read_config(models["bfloat16" if kind == "int8" else kind])
    if kind == "int8":
        model = replace(model, int8=Int8(group_size=None))
    limits = runtime.decide(JaxConfig(**settings), model)
    assert limits.dtype == dtype
    assert limits.exact


@pytest.mark.parametrize(("trains", "samples"), [(True, True), (True, False), (False, True)])
def test_two_backends_of_one_model_stay_at_float32(
    models: dict[str, Path], jax_cache: Path, trains: bool, samples: bool
) -> None:
    assert native.load(jax_cache)
    budget = runtime.divided(JaxConfig(), read_config(models["bfloat16"]), None, trains=trains, samples=samples)
    rounds = trains and samples and native.multiplies_bfloat16()
    assert budget.costs.computing.dtype == ("bfloat16" if rounds else "float32")


def test_what_xla_trains_in_bfloat16_it_samples_as_well(models: dict[str, Path], jax_cache: Path) -> None:
    assert native.load(jax_cache)
    limits = runtime.decide(JaxConfig(dtype="bfloat16", recompute=True), read_config(models["bfloat16"]))
    assert (limits.native, limits.exact, limits.value_dtype) == (False, False, "bfloat16")


@pytest.mark.parametrize("repetitions", [3, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("kind", "max_lora_rank"),
    # a rank of half a vector is compiled otherwise: 8 with AVX-512, 4 with AVX2
    [
        ("qwen3", 16),
        ("qwen3", 8),
        ("bfloat16", 16),
        ("odd_hybrid", 16),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in (("qwen3", 4), ("narrow", 16), ("hybrid", 16))),
    ],
)
async def test_a_sequence_has_the_bits_that_it_has_alone(
    models: dict[str, Path], jax_cache: Path, kind: str, max_lora_rank: int, repetitions: int
) -> None:
    """Beside any number of others up to all slots, with whatever adapters, truncation and alternatives these have."""
    limits: dict[str, Any] = {"max_context_tokens": 128, "decode_slots": 16, "max_lora_rank": max_lora_rank}
    limits["dtype"] = "bfloat16" if kind.startswith("bfloat16") else "float32"
    backend = make_backend(models[kind], jax_cache, **limits)
    for name, lora in LORAS.items():
        add_model(backend, name, LoraConfig(rank=min(lora.rank, max_lora_rank), seed=lora.seed), random_B=True)
        await backend.load_snapshot(backend.publish(name, name))
    rng = np.random.default_rng(0)
    ops = [
        make_sample(
            prompt(int(rng.choice([1, 20, 64, 65, 80])), seed=n),
            [None, "a", "b"][n % 3],
            session=str(n % 5),
            max_tokens=int(rng.integers(1, 40)),
            seed=n,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([-1, 20])),
            topk_sample_logprobs=int(rng.choice([0, 0, 3])),
        )
        for n in range(16)
    ]
    expected = [await sample(backend, op) for op in ops]
    for count in (16, 2, *rng.integers(3, 16, repetitions)):
        chosen = rng.permutation(16)[:count]
        for one, output in zip(chosen, await sample_at_once(backend, [ops[n] for n in chosen]), strict=True):
            assert_same_sequences(output, expected[one])
            if ops[one].topk_sample_logprobs:
                found, right = output.sequences[0].top_logprobs, expected[one].sequences[0].top_logprobs
                assert found.logprobs.tobytes() == right.logprobs.tobytes()
    backend.close()


async def sample_at_once(backend: JaxBackend, ops: list[Sample]) -> list[SampleOutput]:
    """Read no prompt before all requests are there."""
    device, all_are_there = sampling_of(backend), threading.Event()
    prefill = device.prefill

    def read_later(tiles: Sequence[PromptTile]) -> Any:
        all_are_there.wait()
        return prefill(tiles)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "prefill", read_later)
        running = [asyncio.ensure_future(sample(backend, op)) for op in ops]
        await asyncio.sleep(0)  # each asks in its first step
        all_are_there.set()
        return list(await asyncio.gather(*running))


async def test_twice_as_many_sequences_while_they_are_short(
    tiny_models: dict[str, Path], jax_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots share the memory of half as many sequences of the longest kind, each with an adapter of its own."""
    limits = {"max_context_tokens": 128, "max_lora_rank": 8, "prefill_tokens": 64 * 64}
    backend = make_backend(tiny_models["qwen3"], jax_cache, **limits)
    device = local(backend).sampling
    assert device is not None
    assert backend.sampler_capabilities.max_sequences == 32
    assert device.shape.pages_per_shard == 1 + 16 * 3
    for n in range(20):
        add_model(backend, str(n), LoraConfig(rank=4, seed=n), random_B=True)
        await backend.load_snapshot(backend.publish(str(n), str(n)))
    together: list[int] = []
    decode = device.decode

    def noting(slots: SlotInput, num_steps: int) -> Drawn:
        together.append(int((slots.left > 0).sum()))
        return decode(slots, num_steps)

    monkeypatch.setattr(device, "decode", noting)

    async def most(ops: list[Sample]) -> int:
        expected = [await sample(backend, op) for op in ops]
        together.clear()
        for output, alone in zip(await sample_at_once(backend, ops), expected, strict=True):
            assert_same_sequences(output, alone)
        assert not backend.sampler.slots.draws
        return max(together)

    def asked(length: int, name: str | None = None, *, n: int, max_tokens: int, num_samples: int = 1) -> Sample:
        drawn = {"max_tokens": max_tokens, "num_samples": num_samples, "temperature": 1.0, "seed": n}
        return make_sample(prompt(length, seed=n), name, session=str(n % 3), **drawn)

    assert await most([asked(20, n=n, max_tokens=8) for n in range(40)]) == 24  # a page each, and one of the prompt
    assert await most([asked(70, n=n, max_tokens=50) for n in range(20)]) == 16
    assert await most([asked(20, str(n), n=n, max_tokens=8) for n in range(20)]) == 16  # one row for each adapter
    groups = [asked(int(length), n=n, max_tokens=30, num_samples=4) for n, length in enumerate((1, 20, 64, 65, 90))]
    assert await most(groups) >= 16
    backend.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_have_the_bits_that_they_have_alone(
    tiny_models: dict[str, Path], jax_cache: Path, dtype: str
) -> None:
    """Beside others, before and behind them, and in streams of other sizes with unused tiles."""
    backend = make_backend(tiny_models["qwen3"], jax_cache, **LIMITS, dtype=dtype)
    assert backend.limits.kernels.native
    for name, lora in LORAS.items():
        add_model(backend, name, LoraConfig(rank=16, seed=lora.seed), random_B=True)
    mine = make_op("a", 1, [70, 30, 128])
    alone = gradients(backend, [mine])["a"]
    for lengths in ([9], [64, 64], [200], [1, 1, 1, 100]):
        for ops in ([make_op("b", 2, lengths), mine], [mine, make_op("b", 2, lengths)]):
            assert_same_state(gradients(backend, ops)["a"], alone)
    backend.close()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.thorough)])
def test_the_head_has_the_same_bits_in_chunks(
    tiny_models: dict[str, Path], jax_cache: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    ops = [make_op("a", 1, [70, 30, 128]), make_op("b", 2, [64, 9])]
    found = []
    for logits in (head.CPU_LOGITS, 1):  # the second gives chunks of a tile
        monkeypatch.setattr(head, "CPU_LOGITS", logits)
        backend = make_backend(tiny_models["qwen3"], jax_cache, **LIMITS, dtype=dtype)
        for name, lora in LORAS.items():
            add_model(backend, name, lora, random_B=True)
        found.append(gradients(backend, ops))
        backend.close()
    for name in LORAS:
        assert_same_state(found[0][name], found[1][name])


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc to fill memory")
def test_what_lay_in_memory_before_changes_nothing() -> None:
    """Rooms are not cleared, and neither are the ends of tiles: nothing of them may be read, not even times 0."""
    tests = [
        f"{__file__}::{test.__name__}" for test in (test_gradients_are_those_of_xla, test_samples_are_those_of_xla)
    ]
    filled = "glibc.malloc.perturb=128:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1"  # with huge numbers
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "GLIBC_TUNABLES": filled},
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.thorough
def test_short_vectors_compute_the_same(tmp_path: Path) -> None:
    """All kernels with vectors of four numbers, as on processors with neither AVX2 nor AVX-512."""
    compiler = shutil.which("c++")
    assert compiler is not None
    wrapper = tmp_path / "short"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} -U__AVX512F__ -U__AVX2__ "$@"\n')
    wrapper.chmod(0o700)
    tests = [
        f"{__file__}::{test.__name__}"
        for test in (
            test_gradients_are_those_of_xla,
            test_samples_are_those_of_xla,
            test_bfloat16_is_near_float32,
            test_a_sequence_has_the_bits_that_it_has_alone,
        )
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough", *tests],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "CXX": str(wrapper)},
    )
    assert ran.returncode == 0, ran.stdout


OLD_GCC = ("-U__GNUC__", "-D__GNUC__=11", "-D__builtin_shufflevector=is_not_in_GCC_11")
OTHER_MACHINES = [
    pytest.param("c++", (), id="as here"),
    pytest.param(
        "c++", ("-U__AVX512F__", *OLD_GCC), id="without AVX-512, in the words of GCC 11", marks=pytest.mark.thorough
    ),
    pytest.param("c++", ("-U__AVX512F__", "-U__AVX2__"), id="without AVX2", marks=pytest.mark.thorough),
    pytest.param("g++-11", (), id="by GCC 11", marks=pytest.mark.thorough),  # it contracted no products of one column
]


@pytest.mark.parametrize(("name", "macros"), OTHER_MACHINES)
def test_products_have_one_rounding_in_all_sizes(tmp_path: Path, name: str, macros: Sequence[str]) -> None:
    """With the vectors of this machine, and with those of machines that have shorter ones or an older compiler."""
    compiler = shutil.which(name)
    if compiler is None:
        pytest.skip(f"needs {name}")
    source, program = Path(__file__).with_name("native_bits.cc"), tmp_path / "bits"
    version = subprocess.check_output([compiler, "--version"])
    if b"clang" in version:
        macros = [each for each in macros if each not in OLD_GCC]
    sources = [str(source), str(library.SOURCES / "products.cc"), *macros]
    command = library.command(compiler, version)
    subprocess.run([*command, f"-I{library.SOURCES}", *sources, "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert ran.stdout == ""
    assert ran.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((np.float32, np.int32, np.float32, np.float32, np.float32), "too few arrays"),
        ((np.float32, np.int32, *[np.float32] * 4, np.float32), "too many arrays"),
        ((np.float32, np.float32, *[np.float32] * 4), "array 1 with a wrong type"),
    ],
)
def test_a_call_with_other_arrays_is_refused(jax_cache: Path, arguments: Sequence[type], told: str) -> None:
    assert native.load(jax_cache)
    results = [jax.ShapeDtypeStruct(*each) for each in (((1,), np.int32), ((1,), np.float32), ((1, 4), np.float32))]
    given = [np.zeros((1, 4) if place == 0 else (1,), each) for place, each in enumerate(arguments)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        jax.block_until_ready(jax.ffi.ffi_call(loading.DRAW, results)(*given))


# Machines that cannot compile them ------------------------------------------------------------------------------------


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "loaded_library", None)


def test_without_a_compiler_xla_does_it(
    not_loaded: None,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with caplog.at_level(logging.WARNING, "tinsmith_jax"):
        backend = make_backend(tiny_models["qwen3"], tmp_path, **LIMITS)
    assert not backend.limits.kernels.native
    assert local(backend).sampling is not None
    assert "no C++ compiler" in caplog.text
    backend.close()


def test_a_compiler_that_fails_is_named(
    not_loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "old-compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "x.cc:1: error: no vectors" >&2\nexit 1\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.WARNING, "tinsmith_jax"):
        assert not loading.load(tmp_path / "kernels")
    assert str(compiler) in caplog.text
    assert "no vectors" in caplog.text
    assert not any((tmp_path / "kernels").iterdir())


@pytest.fixture(scope="module")
def built(jax_cache: Path) -> Path:
    """A directory with a compiled library, which other processes of the test run may use, too."""
    return library.compiled(jax_cache / "native", compiler_here()).parent


def test_they_are_compiled_once(built: Path) -> None:
    [made] = built.glob("*.so")
    compiled = made.stat().st_mtime_ns
    assert library.compiled(built, compiler_here()) == made
    assert list(built.glob("*.so")) == [made]
    assert made.stat().st_mtime_ns == compiled


def compiler_here() -> str:
    compiler = shutil.which("c++")
    assert compiler is not None
    return compiler


_LOADS = """
import os, sys
from pathlib import Path
from tinsmith_jax.native import loading
if len(sys.argv) > 2:
    loading.ctypes.CDLL = lambda _: os.kill(os.getpid(), 9)
print(loading.load(Path(sys.argv[1])))
"""


def load_in_a_process(directory: Path, *, dies: bool = False) -> tuple[int, str, str]:
    """Load the kernels, or die while they are loaded. Return the exit status and what was printed."""
    command = [sys.executable, "-c", _LOADS, str(directory), *["dies"][: int(dies)]]
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    return ran.returncode, ran.stdout.strip(), ran.stderr


def truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


def no_content(_: bytes) -> bytes:
    return b""


def zeros(content: bytes) -> bytes:
    return bytes(len(content))


def zeros_at_the_end(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def another_bit(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(content) // 3] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("damage", [truncate, no_content, zeros, zeros_at_the_end, another_bit])
def test_a_damaged_library_is_compiled_again(
    built: Path, tmp_path: Path, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut in the first start left one that killed every engine by SIGBUS or SIGSEGV."""
    (good,) = built.glob("*.so")
    content = good.read_bytes()
    (tmp_path / good.name).write_bytes(damage(content))
    put = []

    def remake(made: Path, place: Path) -> None:
        put.append(made)
        place.write_bytes(content)

    monkeypatch.setattr(library, "run", _without_compiling)
    monkeypatch.setattr(library, "put", remake)
    assert library.compiled(tmp_path, compiler_here()) == tmp_path / good.name
    assert put
    assert (tmp_path / good.name).read_bytes() == content


def _without_compiling(command: Sequence[str], **_: object) -> bytes:
    return subprocess.run(command, check=True, capture_output=True).stdout if "--version" in command else b""


@pytest.mark.thorough  # it compiles all kernels twice
def test_a_library_that_kills_its_loader_is_compiled_again_and_then_given_up(built: Path, tmp_path: Path) -> None:
    (good,) = built.glob("*.so")
    shutil.copy(good, tmp_path)
    made = (tmp_path / good.name).stat().st_ino
    assert load_in_a_process(tmp_path, dies=True)[0] == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    assert load_in_a_process(tmp_path, dies=True)[0] == -signal.SIGKILL
    assert (tmp_path / good.name).stat().st_ino != made
    status, loaded, told = load_in_a_process(tmp_path)
    assert (status, loaded) == (0, "False")
    assert "has ended this process before" in told
    for marker in tmp_path.glob("*.loading-1-*"):
        marker.unlink()
    assert load_in_a_process(tmp_path)[:2] == (0, "True")
    assert [each.name for each in tmp_path.iterdir()] == [good.name]
    assert load_in_a_process(tmp_path)[:2] == (0, "True")


def test_a_marker_of_a_process_that_is_loading_says_nothing(built: Path, tmp_path: Path) -> None:
    (good,) = built.glob("*.so")
    shutil.copy(good, tmp_path)
    with library.loading(tmp_path / good.name), library.loading(tmp_path / good.name):
        before = (tmp_path / good.name).stat().st_ino
        assert library.compiled(tmp_path, compiler_here()).stat().st_ino == before
    assert [each.name for each in tmp_path.iterdir()] == [good.name]


@pytest.mark.parametrize("place", ["tempfile.mkstemp", "fcntl.flock"])
def test_a_cache_that_takes_no_marker_is_used_without(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It may be read-only, or on a file system without locks. The library's digest has been compared before."""
    (good,) = built.glob("*.so")
    shutil.copy(good, tmp_path)
    tmp_path.joinpath(f"{good.stem}.loading-0-left").touch()  # by a machine that could

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS if place == "tempfile.mkstemp" else errno.ENOSYS, "planted")

    monkeypatch.setattr(f"tinsmith_jax.native.library.{place}", refused)
    ran = []
    with library.loading(tmp_path / good.name):
        ran.append(1)
    assert ran
    assert not list(tmp_path.glob(".loading-*"))
    with pytest.raises(OSError, match="cannot load"), library.loading(tmp_path / good.name):
        raise OSError("cannot load")


_BEGINS = """
import os, sys
from pathlib import Path
from tinsmith_jax import plugin
from tinsmith_jax.native import library
assert library.begins_early(os.environ)
print(library.begin(Path(sys.argv[1]), sys.argv[2]).result())
print("jax" in sys.modules)
"""


def test_compiling_begins_before_jax_is_imported(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-c", _BEGINS, str(tmp_path / "kernels"), str(compiler)]
    on_cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=on_cpu)
    made, imported = ran.stdout.split()
    assert Path(made).parent == tmp_path / "kernels"
    assert Path(made).exists()
    assert imported == "False"


@pytest.mark.parametrize(("platforms", "begins"), [("", True), ("cpu", True), ("tpu", False), ("cuda,cpu", False)])
def test_compiling_begins_early_only_if_a_cpu_will_compute(
    monkeypatch: pytest.MonkeyPatch, platforms: str, begins: bool
) -> None:
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(library, "find_spec", lambda _: None)  # no plugin, whatever this machine has
    assert library.begins_early({"JAX_PLATFORMS": platforms}) == begins


def test_compiling_does_not_begin_early_where_jax_has_a_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "jax")
    (tmp_path / "jax_plugins" / "xla_cuda").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not library.begins_early({})


def test_once_jax_is_imported_it_is_too_late_to_begin_early() -> None:
    assert not library.begins_early({"JAX_PLATFORMS": "cpu"})
