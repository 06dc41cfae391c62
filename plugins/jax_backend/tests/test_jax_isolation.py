"""Bit for bit on CPU: alone or in company, merged or apart, before and after a slot was somebody else's."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_harness import add_model, assert_same_bits, assert_same_state, make_backend, make_op, train

from tinsmith import AdamParams, Array, Forward, ForwardBackward, LoraConfig, ModelState, OptimStep
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.compilation import compile_program
from tinsmith_jax.layers import rms_norm

ADAM = AdamParams(learning_rate=1e-2)
# ranks across the classes 8 and 16, flags, learning rates, decay, losses
TENANTS: tuple[tuple[LoraConfig, AdamParams, str], ...] = (
    (LoraConfig(rank=1, seed=1), AdamParams(learning_rate=1e-2), "cross_entropy"),
    (LoraConfig(rank=8, seed=2, train_mlp=False), AdamParams(learning_rate=3e-3, weight_decay=0.5), "cross_entropy"),
    (LoraConfig(rank=9, seed=3), AdamParams(learning_rate=2e-2, beta2=0.999), "dro"),
    (LoraConfig(rank=16, seed=4, train_unembed=False), AdamParams(learning_rate=1e-3), "cispo"),
    (LoraConfig(rank=3, seed=5, train_attn=False), AdamParams(learning_rate=5e-3, grad_clip_norm=1.0), "ppo"),
    (LoraConfig(rank=8, seed=6), AdamParams(learning_rate=1e-2, beta1=0.5), "importance_sampling"),
    (LoraConfig(rank=12, seed=7), AdamParams(learning_rate=1e-2, eps=1e-8), "cross_entropy"),
    (LoraConfig(rank=2, seed=8, train_attn=False, train_mlp=False), AdamParams(learning_rate=1e-1), "cross_entropy"),
)
LENGTHS = ((5,), (64, 1), (130,), (17, 65, 3), (200,), (33, 31), (70, 70), (128,))
NUM_STEPS = 4


@pytest.fixture(scope="module")
def few_programs(tiny_models: Mapping[str, Path], jax_cache: Path, shipped_compilation: None) -> JaxBackend:
    return make_backend(tiny_models["qwen3"], jax_cache, max_context_tokens=128, max_batch_tokens=128)


@pytest.fixture(scope="module")
def many_programs(tiny_models: Mapping[str, Path], jax_cache: Path, shipped_compilation: None) -> JaxBackend:
    return make_backend(tiny_models["qwen3"], jax_cache, max_context_tokens=256, max_batch_tokens=256)


@pytest.fixture(scope="module")
def with_experts(tiny_models: Mapping[str, Path], jax_cache: Path, shipped_compilation: None) -> JaxBackend:
    return make_backend(tiny_models["qwen3_moe"], jax_cache, max_context_tokens=256, max_batch_tokens=256)


@pytest.fixture(scope="module")
def in_bfloat16(tiny_models: Mapping[str, Path], jax_cache: Path, shipped_compilation: None) -> JaxBackend:
    limits = {"max_context_tokens": 256, "max_batch_tokens": 256}
    backend = make_backend(tiny_models["qwen3"], jax_cache, **limits, dtype="bfloat16")
    if not backend.limits.native:
        pytest.skip("needs a C++ compiler: XLA in bfloat16 does not promise bits")
    return backend


@pytest.fixture(
    params=[
        "few_programs",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("many_programs", "with_experts", "in_bfloat16")),
    ],
    ids=["few", "many", "experts", "bfloat16"],
)
def backend(request: pytest.FixtureRequest) -> Iterator[JaxBackend]:
    shared: JaxBackend = request.getfixturevalue(request.param)
    yield shared
    for number in range(len(TENANTS)):
        shared.unload_model(f"t{number}")
    for name in ("m", "n"):
        shared.unload_model(name)


def tenant_op(number: int, step: int) -> ForwardBackward:
    return make_op(f"t{number}", 100 * number + step, LENGTHS[number], TENANTS[number][2])


def solo_curve(backend: JaxBackend, number: int) -> tuple[list[float], list[list[Array]], ModelState]:
    lora, adam, _ = TENANTS[number]
    add_model(backend, f"t{number}", lora)
    results = [train(backend, tenant_op(number, step), adam) for step in range(NUM_STEPS)]
    state = backend.capture_state(f"t{number}")
    backend.unload_model(f"t{number}")
    return [loss for loss, _ in results], [logprobs for _, logprobs in results], state


@pytest.mark.thorough  # the short form is the next test, and the suites' tests of company
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["many_programs", "with_experts", "in_bfloat16"], indirect=True
)  # some sequences are long
def test_eight_tenants_together_have_their_solo_curves(backend: JaxBackend) -> None:
    solo = [solo_curve(backend, number) for number in range(len(TENANTS))]
    for number, (lora, _, _) in enumerate(TENANTS):
        add_model(backend, f"t{number}", lora)
    for step in range(NUM_STEPS):
        order = np.random.default_rng(step).permutation(len(TENANTS))  # company and places change with every step
        outputs = backend.forward_backward([tenant_op(number, step) for number in order])
        backend.optim_step([OptimStep(model_id=f"t{number}", adam=TENANTS[number][1]) for number in order])
        for number, output in zip(order, outputs, strict=True):
            losses, logprobs, _ = solo[number]
            assert output.metrics["loss:sum"] == losses[step]
            for ours, alone in zip(output.loss_fn_outputs, logprobs[step], strict=True):
                assert_same_bits(ours, {"logprobs": alone})
    for number, (_, _, state) in enumerate(solo):
        assert_same_state(backend.capture_state(f"t{number}"), state)


@pytest.mark.parametrize("rank", [4, pytest.param(16, marks=pytest.mark.thorough)])
def test_many_layouts_of_company_change_no_bit(backend: JaxBackend, rank: int) -> None:
    """Random strangers before, behind and between, up to the greatest bucket."""
    op = make_op("m", 0, (1, 64, 65, 30))
    add_model(backend, "m", LoraConfig(rank=rank, seed=1), random_B=True)
    start = backend.capture_state("m")
    (alone,) = backend.forward_backward([op])
    gradients = backend.capture_state("m")
    for number in range(6):
        add_model(backend, f"t{number}", LoraConfig(rank=rank, seed=number), random_B=True)
    for layout in range(12):
        rng = np.random.default_rng(layout)
        strangers = [
            make_op(f"t{number}", layout, rng.integers(1, 120, rng.integers(1, 3)))
            for number in rng.choice(6, rng.integers(1, 7), replace=False)
        ]
        place = int(rng.integers(0, len(strangers) + 1))
        backend.restore_state("m", start)
        outputs = backend.forward_backward([*strangers[:place], op, *strangers[place:]])
        assert outputs[place].metrics == alone.metrics
        for ours, expected in zip(outputs[place].loss_fn_outputs, alone.loss_fn_outputs, strict=True):
            assert_same_bits(ours, expected)
        assert_same_state(backend.capture_state("m"), gradients)


@pytest.mark.thorough  # as its users compile it; the shipped suites have two tests of the same
def test_forward_leaves_gradients_alone(backend: JaxBackend) -> None:
    add_model(backend, "m", LoraConfig(rank=4, seed=1), random_B=True)
    op = make_op("m", 0, (30, 90))
    (trained,) = backend.forward_backward([op])
    before = backend.capture_state("m")
    (scored,) = backend.forward([Forward(model_id="m", data=op.data)])
    assert_same_state(backend.capture_state("m"), before)
    for one, other in zip(scored.loss_fn_outputs, trained.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [8, pytest.param(16, marks=pytest.mark.thorough)])
def test_two_calls_equal_one_with_both_data(backend: JaxBackend, rank: int) -> None:
    """However the data are cut into operations, calls and micro-batches."""
    longest = backend.trainer_capabilities.max_context_tokens or 0
    op = make_op("m", 0, (30, 90, 64, longest - 56, 1, longest, 65))

    def part(start: int, end: int) -> ForwardBackward:
        return ForwardBackward(model_id="m", data=op.data[start:end])

    ways = (
        [[op]],
        [[part(0, 3)], [part(3, 7)]],
        [[part(0, 1), part(1, 7)]],
        [[part(i, i + 1)] for i in range(7)],
        [[part(i, i + 1) for i in range(7)]],
    )
    states, weights = [], []
    for calls in ways:
        add_model(backend, "m", LoraConfig(rank=rank, seed=1), random_B=True)
        for call in calls:
            backend.forward_backward(call)
        states.append(backend.capture_state("m"))
        backend.optim_step([OptimStep(model_id="m", adam=ADAM)])
        weights.append(backend.capture_state("m"))
        backend.unload_model("m")
    for state, after in zip(states[1:], weights[1:], strict=True):
        assert_same_state(state, states[0])
        assert_same_state(after, weights[0])


@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 1e30])
def test_a_neighbours_nan_and_decay_stay_with_it(backend: JaxBackend, poison: float) -> None:
    add_model(backend, "m", LoraConfig(rank=4, seed=1))
    alone = [train(backend, make_op("m", step, (40, 70)), ADAM) for step in range(2)]
    expected = backend.capture_state("m")
    backend.unload_model("m")

    add_model(backend, "m", LoraConfig(rank=4, seed=1))
    add_model(backend, "n", LoraConfig(rank=5, seed=2))
    bad = {name: np.full_like(value, poison) for name, value in backend.capture_state("n").weights.items()}
    backend.restore_state("n", ModelState(lora=LoraConfig(rank=5, seed=2), weights=bad))
    for step in range(2):
        mine, theirs = make_op("m", step, (40, 70)), make_op("n", step, (64, 10, 3))
        first, second = (mine, theirs) if step else (theirs, mine)
        results = backend.forward_backward([first, second])
        outputs = dict(zip((first.model_id, second.model_id), results, strict=True))
        decayed = AdamParams(learning_rate=1e30, weight_decay=0.9)
        backend.optim_step([OptimStep(model_id="n", adam=decayed), OptimStep(model_id="m", adam=ADAM)])
        assert outputs["m"].metrics["loss:sum"] == alone[step][0]
        assert not np.isfinite(outputs["n"].metrics["loss:sum"])
    assert_same_state(backend.capture_state("m"), expected)


@pytest.mark.parametrize("rank", [3, pytest.param(16, marks=pytest.mark.thorough)])
def test_steps_together_equal_steps_apart(backend: JaxBackend, rank: int) -> None:
    """Also from moments and weights of all sizes, where a differently fused multiply-add shows."""
    adams = [
        AdamParams(learning_rate=10.0**-number, beta1=0.1 * number, weight_decay=0.05 * number, grad_clip_norm=number)
        for number in range(7)
    ]
    rng = np.random.default_rng(0)
    names = [f"t{number}" for number in range(7)]
    states = []
    for number, name in enumerate(names):
        lora = LoraConfig(rank=rank, seed=number)
        add_model(backend, name, lora)
        weights = backend.capture_state(name).weights

        def draw(sign: int, weights: Mapping[str, Array] = weights) -> dict[str, Array]:
            def one(shape: tuple[int, ...]) -> Array:
                return rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 2, shape)

            return {k: (one(v.shape) if sign else np.abs(one(v.shape))).astype(np.float32) for k, v in weights.items()}

        states.append(
            ModelState(lora=lora, weights=draw(1), adam_m=draw(1), adam_v=draw(0), gradients=draw(1), step=number)
        )
    results = []
    for together in (True, False):
        for name, state in zip(names, states, strict=True):
            backend.restore_state(name, state)
        ops = [OptimStep(model_id=name, adam=adam) for name, adam in zip(names, adams, strict=True)]
        for call in [ops] if together else [[op] for op in ops]:
            backend.optim_step(call)
        results.append([backend.capture_state(name) for name in names])
    for one, other in zip(*results, strict=True):
        assert_same_state(one, other)


def test_a_step_touches_its_own_model_only(backend: JaxBackend) -> None:
    add_model(backend, "m", LoraConfig(rank=4, seed=1))
    add_model(backend, "n", LoraConfig(rank=4, seed=2))
    backend.forward_backward([make_op("m", 0, (20,)), make_op("n", 1, (20,))])
    before = backend.capture_state("m")
    backend.optim_step([OptimStep(model_id="n", adam=AdamParams(learning_rate=1.0, weight_decay=0.9))])
    assert_same_state(backend.capture_state("m"), before)


def test_a_reused_slot_starts_clean(backend: JaxBackend) -> None:
    add_model(backend, "m", LoraConfig(rank=4, seed=1))
    expected = [train(backend, make_op("m", step, (40,)), ADAM) for step in range(2)]
    backend.forward_backward([make_op("m", 9, (40,))])  # left pending
    backend.unload_model("m")
    add_model(backend, "m", LoraConfig(rank=4, seed=1))
    fresh = backend.capture_state("m")
    assert fresh.step == 0
    assert not fresh.gradients
    assert not fresh.adam_m
    again = [train(backend, make_op("m", step, (40,)), ADAM) for step in range(2)]
    assert [loss for loss, _ in again] == [loss for loss, _ in expected]


def test_the_sum_of_a_step_without_gradient(backend: JaxBackend) -> None:
    """A step with nothing pending decays, and moves by momentum only."""
    add_model(backend, "m", LoraConfig(rank=4, seed=1))
    before = backend.capture_state("m").weights
    (output,) = backend.optim_step([OptimStep(model_id="m", adam=AdamParams(learning_rate=0.5, weight_decay=0.5))])
    assert output.metrics["grad_norm"] == 0
    after = backend.capture_state("m").weights
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value * np.float32(0.75))


PARTS: dict[str, Callable[[Array, Array], Any]] = {
    "norm": lambda x_TI, _: rms_norm(x_TI, jnp.ones(x_TI.shape[1]), 1e-6),
    "product": lambda x_TI, w_IO: x_TI @ w_IO,
    "softmax": lambda x_TI, w_IO: jax.nn.softmax(x_TI @ w_IO, axis=-1),
}
"""What XLA computes of the rows of a whole pass, given their hidden states and a matrix."""


@pytest.mark.parametrize(
    ("part", "inputs", "outputs"), [("norm", 16, 16), ("product", 256, 6), ("product", 768, 32), ("softmax", 128, 8)]
)
def test_a_rows_bits_do_not_show_the_size_of_its_pass(
    shipped_compilation: None, part: str, inputs: int, outputs: int
) -> None:
    """With its gradient. XLA leaves large sums to another library, and small ones not."""
    rng = np.random.default_rng(0)
    x_TI, w_IO, d_TO = (
        rng.normal(size=shape).astype(np.float32) for shape in ((2048, inputs), (inputs, outputs), (2048, outputs))
    )

    def both(x_TI: Array, w_IO: Array, d_TO: Array) -> tuple[Any, Any]:
        out, pull_back = jax.vjp(lambda x_TI: PARTS[part](x_TI, w_IO), x_TI)
        return out, pull_back(d_TO)

    def run(num_rows: int) -> list[Array]:
        given = x_TI[:num_rows], w_IO, d_TO[:num_rows]
        results = compile_program(jax.jit(both), given, on_cpu=True)(*given)
        return [np.asarray(each)[:128] for each in jax.tree.leaves(results)]

    expected = run(128)
    for num_rows in (512, 2048):
        for found, value in zip(run(num_rows), expected, strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), value.view(np.uint32), err_msg=f"of {num_rows} rows")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kernels"), [("qwen3", "device"), ("qwen3", "reference"), ("qwen3_moe", "device")], ids="-".join
)
def test_the_size_of_the_bucket_changes_no_bit(
    tiny_models: Mapping[str, Path], jax_cache: Path, shipped_compilation: None, kind: str, kernels: str
) -> None:
    """The largest bucket against the smallest."""
    backend = make_backend(
        tiny_models[kind], jax_cache, max_context_tokens=2048, max_batch_tokens=2048, kernels=kernels
    )
    mine, company = make_op("m", 1, (100,)), make_op("n", 2, (1900,))

    def run(ops: list[ForwardBackward]) -> Mapping[str, Array]:
        for name, seed in (("m", 3), ("n", 4)):
            backend.unload_model(name)
            add_model(backend, name, LoraConfig(rank=8, seed=seed), random_B=True)
        forward = backend.forward([Forward(model_id=op.model_id, data=op.data) for op in ops])[0]
        output = backend.forward_backward(ops)[0]
        logprobs = {str(n): each.loss_fn_outputs[0]["logprobs"] for n, each in enumerate((forward, output))}
        metrics = {name: np.array([forward.metrics[name], value]) for name, value in output.metrics.items()}
        return {**logprobs, **metrics, **backend.capture_state("m").gradients}

    alone = run([mine])
    assert ("e_max_violation:max" in alone) == (kind == "qwen3_moe")
    assert_same_bits(alone, run([mine, company]))
