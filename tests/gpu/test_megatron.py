"""The megatron backend with one rank on the GPU, dense and with experts, beside float32 on the CPU."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gpu_harness import ON_CPU, Array, add_models, farthest, made_backend, passes, scored, step

TENANTS = (1, 16)


def seen(model: Path, cache_dir: Path, device: str, dtype: str) -> dict[int, list[list[Array]]]:
    """Return the logprobs of two steps of one and of sixteen tenants."""
    settings = {
        "device": device,
        "nproc_per_node": 1,
        "dtype": dtype,
        "isolation": "fast",
        "max_models": max(TENANTS),
        "max_lora_rank": 32,
    }
    found = {}
    with made_backend("megatron", model, cache_dir, settings) as backend:
        for tenants in TENANTS:
            models = [f"{tenants}-{number}" for number in range(tenants)]
            if tenants == max(TENANTS):
                backend.unload_model("1-0")
            add_models(backend, models)
            found[tenants] = []
            for _ in range(2):
                found[tenants].append(scored(backend, passes(models, seed=tenants)))
                step(backend, models)
    return found


@pytest.mark.parametrize(
    ("family", "most", "on_average"),
    [("qwen3", 0.1, 0.01), ("qwen3_moe", 1.0, 0.05)],  # rounding may send a token to another expert
)
def test_passes_and_steps_beside_the_reference(
    family: str, most: float, on_average: float, models: Mapping[str, Path], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as threads:  # both start their ranks at once
        ours = threads.submit(seen, models[family], tmp_path / "ours", "cpu" if ON_CPU else "cuda", "bfloat16")
        theirs = threads.submit(seen, models[family], tmp_path / "theirs", "cpu", "float32")
    for tenants in TENANTS:
        for a, b in zip(ours.result()[tenants], theirs.result()[tenants], strict=True):
            assert farthest(a, b) < most, tenants
            assert np.abs(np.concatenate(a) - np.concatenate(b)).mean() < on_average, tenants
