"""No sample's bits show what else is sampled, nor what was sampled before. Compiled as users do."""

from pathlib import Path

import numpy as np
import pytest
from jax_harness import add_model, make_backend
from sampling_harness import assert_same_sequences, forget_all, make_sample, prompt, sample, sample_all

from tinsmith import LoraConfig

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("shipped_compilation")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_bits_of_random_layouts_are_those_alone(
    tiny_models: dict[str, Path], jax_cache: Path, dtype: str
) -> None:
    """Two hundred layouts of requests that share prefixes or do not, on a cache in any state."""
    backend = make_backend(tiny_models["qwen3"], jax_cache, decode_slots=6, dtype=dtype)
    assert backend.limits.exact
    for name, rank in (("a", 4), ("b", 16)):
        add_model(backend, name, LoraConfig(rank=rank, seed=rank), random_B=True)
        await backend.load_snapshot(backend.publish(name, name))
    rng = np.random.default_rng(3)
    ops = [
        make_sample(
            prompt(length, seed=n % 3),
            [None, "a", "b"][n % 3],
            session=str(n % 5),
            max_tokens=int(rng.integers(1, 30)),
            num_samples=int(rng.choice([1, 1, 2, 5])),
            seed=n,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([-1, 20])),
            prompt_logprobs=n % 4 == 0,
        )
        for n, length in enumerate((1, 2, 20, 63, 64, 65, 66, 100, 129, 150, 200, 260) * 2)
    ]
    expected = []
    for op in ops:
        forget_all(backend)
        expected.append(await sample(backend, op))
    for _ in range(200):
        if rng.random() < 0.3:
            forget_all(backend)
        chosen = rng.permutation(len(ops))[: int(rng.integers(2, 14))]
        for one, output in zip(chosen, await sample_all(backend, [ops[n] for n in chosen]), strict=True):
            assert_same_sequences(output, expected[one])
            if ops[one].prompt_logprobs:
                np.testing.assert_array_equal(output.prompt_logprobs, expected[one].prompt_logprobs)
    backend.close()
