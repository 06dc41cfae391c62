"""How Triton compiles a Pallas kernel, for GPUs.

JAX is going to drop this way of Pallas to GPUs, and other platforms do not need it: it is imported where one compiles.
"""

from typing import Any


def compiler(warps: int, stages: int, interpret: bool) -> dict[str, Any]:  # noqa: FBT001
    """Return arguments for pallas_call. With `interpret`, the kernel runs as plain JAX, on any device."""
    if interpret:
        return {"interpret": True}
    from jax.experimental.pallas import triton

    return {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=stages)}
