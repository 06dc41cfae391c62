"""Where ranks compute: a GPU that torch cannot use is refused, and what only a GPU does is done with stand-ins."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attention_on_cpu
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from megatron_harness import make_backend

from tinsmith import ConfigError, Placement
from tinsmith_megatron import cpu_shim
from tinsmith_megatron.attention import PackedAttention
from tinsmith_megatron.parallel import Coordinates
from tinsmith_megatron.rank import Rank
from tinsmith_workers import Launch, Launcher, WorkerDevice, alone


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


@pytest.mark.parametrize(
    ("scale", "value_size"),
    [pytest.param(None, attention_on_cpu.SIZE, id="plain"), pytest.param(0.3, 10, id="latents")],
)
def test_attention_on_a_gpu_is_that_of_each_sequence(
    scale: float | None, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, ends = PackedAttention(softmax_scale=scale), attention_on_cpu.starts()
    stream: Any = SimpleNamespace(starts=ends, longest=64, bounds=tuple(pairwise(ends.tolist())))
    attention.stream = stream

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (each[:, None] for each in tensors)
        out: torch.Tensor = attention(query, key, value)[:, 0]
        return out.unflatten(1, (attention_on_cpu.HEADS, value_size))

    stand_in = SimpleNamespace(pad=F.pad, scaled_dot_product_attention=partial(pytest.fail, "it took the CPU's branch"))
    monkeypatch.setattr("tinsmith_megatron.attention.F", stand_in)
    attention_on_cpu.check_on_card(attend, scale, value_size)


def imported(name: str, monkeypatch: pytest.MonkeyPatch, stand_ins: Mapping[str, Mapping[str, Any]]) -> Any:
    """Import a module of the plugin anew, with others in the place of Megatron's, which would need the shim."""
    for parent in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for each, content in stand_ins.items():
        module = ModuleType(each)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, each, module)
    spec = importlib.util.find_spec(f"tinsmith_megatron.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"tinsmith_megatron.{name}", module)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_where_there_is_a_gpu_nothing_is_taken_from_the_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's name for TransformerEngine's product was: a NameError in the first pass with experts on a GPU."""
    made = {"stage": "Stage", "trainer": "Trainer", "canonical": "read", "groups": "join"}
    moe_utils = ModuleType("moe_utils")
    stand_ins: dict[str, dict[str, Any]] = {f"tinsmith_megatron.{each}": {name: object} for each, name in made.items()}
    stand_ins["megatron.core.transformer.moe"] = {"moe_utils": moe_utils}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_shim, "install", partial(pytest.fail, "the shim is in place"))
    imported("megatron_here", monkeypatch, stand_ins)
    assert moe_utils.te_general_gemm is None


class RankOnACard:
    """Answers as the rank that has it would."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __len__(self) -> int:
        return 1

    def call(self, method: Any, *_: object) -> list[object]:
        if method.__name__ == "load":
            return [SimpleNamespace(coordinates=Coordinates(**dict.fromkeys(fields_of(Coordinates), 0)))]
        return [WorkerDevice(type="cuda", name="H100", memory_bytes=80 << 30) if method.__name__ == "device" else True]

    def close(self) -> None: ...


def fields_of(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def test_on_gpus_no_bits_are_claimed(
    megatron_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_workers.training_backend.WorkerGroup", RankOnACard)
    placement = Placement(devices=("0",), memory_bytes=40 << 30, device_bytes=80 << 30)
    found = make_backend(megatron_models["qwen3"], tmp_path, placement=placement, device="cuda").trainer_capabilities
    assert (found.device, found.dtype, found.deterministic, found.isolation) == ("1 x H100", "bfloat16", False, "close")
