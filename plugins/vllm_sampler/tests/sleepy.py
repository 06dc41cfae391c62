"""The vLLM process with sleep mode on a CPU, where vLLM has none.

What it asks of vLLM goes through vLLM's own engine, scheduler and executor. Only what the worker does is ours: on a GPU
it unmaps memory, here it empties storages. Weights, and those of adapters, go to a copy; keys and values are lost.
"""

import runpy
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tinsmith_vllm import compat


def weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        for value in vars(module).values():  # of an adapter: tuples of stacked tensors
            yield from (each for each in (value if isinstance(value, tuple) else ()) if isinstance(each, torch.Tensor))


def storages(tensors: Any) -> list[torch.UntypedStorage]:
    return list({each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}.values())  # noqa: SLF001 - a storage's identity


def sleep(self: Any, level: int = 1) -> None:
    assert level == 1
    runner = self.model_runner
    self.kept = [(each, each.clone()) for each in storages(weights(runner.get_model()))]
    self.lost = [(each, each.nbytes()) for each in storages(runner.kv_caches)]
    assert self.kept
    assert self.lost
    for storage, _ in [*self.kept, *self.lost]:
        storage.resize_(0)


def wake_up(self: Any, tags: Any = None) -> None:
    assert tags is None
    for storage, copy in self.kept:
        storage.resize_(copy.nbytes())
        storage.copy_(copy)
    for storage, size in self.lost:
        storage.resize_(size)
        storage.fill_(
            0x42
        )  # 48.6, which would be seen; kernels for CPUs compute with what they mask, so it is a number


def prepare_environment(**how: bool) -> None:
    prepare(**how)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    CpuPlatform.is_sleep_mode_available = lambda _: True
    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def installed() -> tuple[str, bool]:
    version, _ = found()
    return version, False  # else it would be refused


prepare, found = compat.prepare_environment, compat.installed
compat.prepare_environment, compat.installed = prepare_environment, installed
sys.argv = ["child", sys.argv[-1]]
runpy.run_module("tinsmith_vllm.child", run_name="__main__")
