"""Out of memory on a rank: it drops its share of the pass, and all ranks drop the pass.

Layers are gathered from all ranks, in an order that depends on nothing but the pass. A rank that stopped would leave
the others waiting. So it counts its gathers, and after it has given up, gathers the rest for them. Its memory
is empty then: a layer has room, as on a rank that has no sequence of a micro-batch. See ADR 0019.
"""

import errno
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tinsmith_workers.torch import free_what_is_unused

T = TypeVar("T")

_SIGNS: Final = ("Cannot allocate memory", "std::bad_alloc", "CUDA error: out of memory")
"""The messages of the system (quoted by torch's CPU allocator and safetensors), of C++, and of pinned host memory."""

RECOVERS: Final = hasattr(FSDPModule, "reset_iter_state")
"""True if this torch can continue after a failed pass: since 2.13."""


class PassDroppedError(Exception):
    """A rank had too little memory, and all have dropped the pass. The message is empty if it was another rank."""


class CollectiveFailedError(RuntimeError):
    """Not about memory, even if memory is the reason: nobody knows how far the other ranks have come."""


class Gathers:
    """FSDP2's own all-gather, counted: what `FSDPModule.set_custom_all_gather` takes."""

    def __init__(self) -> None:
        self.issued = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002  (FSDP2's signature)
    ) -> Any:  # dist.Work or None
        self.issued += 1
        try:
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        except Exception as error:
            msg = f"gathering a layer failed: {error}"
            raise CollectiveFailedError(msg) from error


class Shortage:
    """Watches the passes of a frozen model. The root holds the weights outside of the layers; it is gathered first."""

    def __init__(self, modules: Sequence[FSDPModule], *, keeps_layers: bool) -> None:
        """modules: the root, then the layers; none if the model is whole on each rank.

        keeps_layers: they stay gathered from the forward to the backward pass.
        """
        self.modules, self._keeps_layers = modules, keeps_layers
        self.gathers = Gathers()
        for module in modules:
            module.set_custom_all_gather(self.gathers)  # type: ignore[arg-type]  # a Protocol but for its name
        for root in modules[:1]:  # else the first pass could not be dropped before it begins
            root._get_fsdp_state()._lazy_init()  # noqa: SLF001

    def attempt(self, work: Callable[[], T], *, backward: bool | None) -> T:
        """Run this rank's part of a pass (backward None: of something that gathers nothing). All ranks must call it.

        If any runs out of memory, PassDroppedError is raised on all. Other errors are raised as they are.
        """
        ahead = [] if backward is None else self._order(backward=backward)
        self.gathers.issued = 0
        told: str | None = None
        try:
            done = work()
        except Exception as error:
            if isinstance(error, CollectiveFailedError) or not is_out_of_memory(error):
                raise
            told = (str(error) or type(error).__name__).splitlines()[0]
        if told is not None:  # not earlier: the error kept the pass's tensors alive
            self._gather(ahead[self.gathers.issued :])
        if self._anywhere(told is not None):
            self._reset()
            raise PassDroppedError(told or "")
        return done

    def _gather(self, ahead: Sequence[FSDPModule]) -> None:
        """Drop the pass's leftovers, and take part in the gathers that the other ranks still need."""
        self._reset()
        free_what_is_unused()
        for module in ahead:
            module.unshard()
            module.reshard()

    def _reset(self) -> None:
        for root in self.modules[:1]:
            root.reset_iter_state()

    def _order(self, *, backward: bool) -> list[FSDPModule]:
        """Return what a pass gathers from now on, in order."""
        forward = [module for module in self.modules if _is_sharded(module)]
        again = backward and not self._keeps_layers
        return [*forward, *(reversed(self.modules[1:]) if again else ())]

    def _anywhere(self, here: bool) -> bool:  # noqa: FBT001
        """Return whether it is so on any rank. Between the hosts' processes: no device waits for it."""
        if dist.get_world_size() == 1:
            return here
        flag = torch.tensor([int(here)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())


def _is_sharded(module: FSDPModule) -> bool:
    """Look at a parameter of its own. The root's first parameters are the embedding's."""
    assert isinstance(module, torch.nn.Module)
    return isinstance(next(module.parameters()), DTensor)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error, or an error in its chain of causes, is about memory.

    torch, Python and the system each say it in their own way.
    """
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return any(sign in str(error) for sign in _SIGNS) or is_out_of_memory(error.__cause__)
