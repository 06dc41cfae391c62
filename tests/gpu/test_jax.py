"""The jax backend on the GPU, training and sampling, beside float32 on the CPU. Each runs in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax_run
import numpy as np
import pytest
from gpu_harness import ON_CPU, relative

FORMS = {"bfloat16": (0.1, 0.1, 0.01), "float32": (0.02, 0.02, 1e-3)}  # with TF32, which keeps 10 bits
"""By dtype: how far logprobs may be, gradients (relative), and the sampler from the trainer, on average."""


@pytest.fixture(scope="module")
def seen(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Any]]:
    """Run all at once."""
    root = tmp_path_factory.mktemp("jax")
    running = {
        name: started(models["qwen3"], root / f"{name}.npz", {"dtype": dtype}, on_cpu=name == "reference")
        for name, dtype in {**{name: name for name in FORMS}, "reference": "float32"}.items()
    }
    for name, process in running.items():
        _, errors = process.communicate()
        assert process.returncode == 0, f"{name}: {errors}"
    return {name: dict(np.load(root / f"{name}.npz")) for name in running}


def started(model: Path, out: Path, settings: Mapping[str, object], *, on_cpu: bool) -> "subprocess.Popen[str]":
    environ = {**os.environ, **({"JAX_PLATFORMS": "cpu"} if on_cpu else {})}
    command = [sys.executable, jax_run.__file__, str(model), str(out), json.dumps(settings)]
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("dtype", FORMS)
def test_training_beside_the_reference(dtype: str, seen: Mapping[str, Mapping[str, Any]]) -> None:
    logprobs, gradients, _ = FORMS[dtype]
    ours, theirs = seen[dtype], seen["reference"]
    assert str(ours["platform"]) == ("cpu" if ON_CPU else "gpu")
    for tenants in ("1", "4"):
        for when in ("before", "after"):
            name = f"{when} {tenants}"
            assert np.abs(ours[name] - theirs[name]).max() < logprobs, name
        assert relative(ours[f"gradients {tenants}"], theirs[f"gradients {tenants}"]) < gradients


@pytest.mark.parametrize("dtype", FORMS)
def test_what_was_trained_is_what_is_sampled(dtype: str, seen: Mapping[str, Mapping[str, Any]]) -> None:
    *_, close = FORMS[dtype]
    assert np.abs(seen[dtype]["sampler"] - seen[dtype]["trainer"]).mean() < close
