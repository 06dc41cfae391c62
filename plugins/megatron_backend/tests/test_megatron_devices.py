"""Where ranks compute: a GPU that torch cannot use is refused, and what only a GPU does is done with stand-ins."""

import importlib.util
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attention_on_cpu
import pytest
import torch
from megatron_harness import make_backend

from tinsmith import ConfigError, Placement
from tinsmith.workers import Launch, Launcher, alone
from tinsmith_megatron import cpu_shim
from tinsmith_megatron.attention import PackedAttention
from tinsmith_megatron.rank import Rank


def test_a_rank_with_a_device_does_not_start_on_the_cpu(
    megatron_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(wanted: Launch) -> Launcher:
        for name, value in wanted.environment.items():
            monkeypatch.setenv(name, value)
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InterruptedError):
        make_backend(megatron_models["qwen3"], tmp_path, launch, placement=Placement(devices=("0",)), device=None)
    with alone() as worker, pytest.raises(ConfigError, match=r"sees no GPU .* CUDA_VISIBLE_DEVICES is '0'"):
        Rank(worker)


def test_attention_on_a_gpu_is_that_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, ends = PackedAttention(), attention_on_cpu.starts()
    stream: Any = SimpleNamespace(starts=ends, longest=64, bounds=tuple(pairwise(ends.tolist())))
    attention.stream = stream

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (each[:, None] for each in tensors)
        out: torch.Tensor = attention(query, key, value)[:, 0]
        return out.unflatten(1, (attention_on_cpu.HEADS, attention_on_cpu.SIZE))

    failing = partial(pytest.fail, "it took the CPU's branch")
    monkeypatch.setattr("tinsmith_megatron.attention.F", SimpleNamespace(scaled_dot_product_attention=failing))
    attention_on_cpu.check_on_card(attend, None)


def test_where_there_is_a_gpu_nothing_is_taken_from_the_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's name for TransformerEngine's product was: a NameError in the first pass with experts on a GPU."""
    made = {"stage": "Stage", "trainer": "Trainer", "weights": "WeightReader", "groups": "join"}
    stand_ins = {f"tinsmith_megatron.{module}": {name: object} for module, name in made.items()}
    moe_utils = ModuleType("moe_utils")
    stand_ins["megatron.core.transformer.moe"] = {"moe_utils": moe_utils}
    for parent in ("megatron", "megatron.core", "megatron.core.transformer"):
        stand_ins[parent] = {}
    for name, content in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_shim, "install", partial(pytest.fail, "the shim is in place"))
    spec = importlib.util.find_spec("tinsmith_megatron.megatron_here")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert moe_utils.te_general_gemm is None
