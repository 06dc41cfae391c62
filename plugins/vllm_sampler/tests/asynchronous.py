"""The vLLM process with asynchronous scheduling on a CPU, where vLLM turns it off because there is nothing to overlap.

Scheduler, model runner and our hooks are what runs on a GPU: a step is prepared before the tokens of the one before are
known. Of CUDA it needs streams and events, which have nothing to do here.
"""

import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tinsmith_vllm import compat

UNDER_WAY = Path(sys.argv[2])
"""This file appears if weights are loaded while a step is under way."""


class Nothing:
    """A stream or an event."""

    def __init__(self, **_: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def turn_on() -> None:
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config

    def configured(_: type, config: Any) -> None:
        configure(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(configured)
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = Nothing
    torch.cuda.stream = lambda _: nullcontext()


def prepare_environment(**how: bool) -> None:
    prepare(**how)
    turn_on()


def make_engine(engine_args: Any) -> Any:
    engine = make(engine_args)
    core = engine.engine_core.engine_core
    assert type(core.scheduler).__name__ == "AsyncScheduler"
    assert core.batch_queue_size == 2
    call = engine.collective_rpc

    def watched(method: str, *arguments: Any, **named: Any) -> Any:
        if method == "tinsmith_load_weights" and core.batch_queue:
            UNDER_WAY.touch()
        return call(method, *arguments, **named)

    engine.collective_rpc = watched
    return engine


prepare, make = compat.prepare_environment, compat.make_engine
compat.prepare_environment, compat.make_engine = prepare_environment, make_engine
sys.argv = ["child", sys.argv[1]]
runpy.run_module("tinsmith_vllm.child", run_name="__main__")
