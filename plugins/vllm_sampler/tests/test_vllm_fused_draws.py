"""The kernels that draw on GPUs draw the tokens of the CPU: in Triton's interpreter, and compiled for an H100."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from tinsmith_vllm.draws import draw

TRITON = Path(sys.prefix) / "triton"  # the Makefile fills it: vLLM for CPUs is to find none
PROGRAMS = Path(__file__).with_name("triton_programs.py")

needs_triton = pytest.mark.skipif(
    not TRITON.is_dir() and importlib.util.find_spec("triton") is None, reason="there is no Triton"
)


def run(mode: str, cache: Path) -> object:
    paths = os.pathsep.join([str(TRITON), str(PROGRAMS.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, PROGRAMS, mode]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_triton
def test_the_kernels_draw_what_torch_draws(tmp_path: Path) -> None:
    """At both ends, with excluded tokens, in rows that are not finite, and where places lie on the edge of a block."""
    wanted, found = run("interpret", tmp_path)  # type: ignore[misc]
    assert found == wanted


@needs_triton
def test_for_an_h100_no_product_is_fused_with_an_addition(tmp_path: Path) -> None:
    """A fused one rounds once instead of twice, so tokens would not be those of the CPU."""
    found = run("compile", tmp_path)
    assert isinstance(found, dict)
    assert len(found) == 3
    assert all(each["fused"] == each["local"] == 0 < each["cubin"] for each in found.values()), found


class OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def test_rows_on_a_gpu_go_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def fused_draw(logits: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        given.append((logits, where.dtype))
        return torch.zeros(len(logits))

    kernels = types.ModuleType("fused_draws")
    kernels.fused_draw = fused_draw  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tinsmith_vllm.fused_draws", kernels)
    logits = torch.zeros(2, 5).as_subclass(OnGpu)
    draw(logits, np.zeros(2))
    assert given == [(logits, torch.float64)]
    draw(torch.zeros(2, 5), np.zeros(2))
    assert len(given) == 1
