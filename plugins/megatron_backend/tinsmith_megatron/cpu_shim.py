"""Lets Megatron-core run where there is no CUDA: what it hard-codes about CUDA devices is mapped to the CPU.

Nothing else in this plugin knows of it, and on a machine with a GPU it is never used. It changes `torch.cuda` and parts
of Megatron for the whole process, so it belongs in a process that runs nothing else.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.overrides import TorchFunctionMode

from tinsmith_megatron.untyped import Untyped

_entered: list[TorchFunctionMode] = []


class _CudaMeansCpu(TorchFunctionMode):
    """Maps device="cuda", `.cuda()` and `.to("cuda")`. Active in the thread that entered it."""

    def __torch_function__(
        self,
        func: Callable[..., Untyped],
        types: Sequence[type],
        args: tuple[Untyped, ...] = (),
        kwargs: Mapping[str, Untyped] | None = None,
    ) -> Untyped:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _NoEvent:
    """On a CPU everything happens in order."""

    def __init__(self, *_: Untyped, **__: Untyped) -> None: ...
    def record(self, *_: Untyped) -> None: ...
    def wait(self, *_: Untyped) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _NoStream:
    """A class, not a function: Megatron uses it in annotations."""

    def __init__(self, *_: Untyped, **__: Untyped) -> None: ...
    def wait_stream(self, _: Untyped) -> None: ...
    def wait_event(self, _: Untyped) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Untyped = None) -> Untyped:
        return event or _NoEvent()


def install() -> None:
    """Map CUDA to the CPU in this process, and in this thread. Call it before the first import of Megatron."""
    assert not torch.cuda.is_available(), "the machine has a GPU"
    if _entered:
        return
    _replace_cuda()
    _replace_in_megatron()
    _entered.append(_CudaMeansCpu())
    _entered[0].__enter__()  # for as long as the process lives


def _replace_cuda() -> None:
    cuda: Untyped = torch.cuda
    stream = _NoStream()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda _: None
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.Stream, cuda.Event = _NoStream, _NoEvent
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed


def _replace_in_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # noqa: SLF001
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # noqa: SLF001
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _to_host


def _to_host(tensor: Untyped, as_numpy: bool = False, record_stream: bool = False) -> Untyped:  # noqa: FBT001, FBT002
    """As Megatron's own, which converts only tensors of GPUs."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
