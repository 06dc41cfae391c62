"""The optimizer's step on a CPU, by a kernel in C++. The arithmetic is that of optimizer.py.

It is one call for all arrays of an adapter, of which XLA's program makes a hundred small ones.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tinsmith_jax.adapters import Adapter
from tinsmith_jax.kernels import native
from tinsmith_jax.optimizer import Hyper, State

# Any below: jax arrays and pytrees of them.
_MODULES = ("q", "k", "v", "o", "gate", "up", "down")  # in the kernel's order; the head comes last


def adamw(state: State, pending: Adapter, h: Hyper) -> tuple[State, Any]:
    """Return the state after a step, and the gradients' norm before clipping."""
    before = [factor for part in state for factor in _in_order(part)]
    like = [jax.ShapeDtypeStruct(factor.shape, factor.dtype) for factor in before]
    call = jax.ffi.ffi_call(native.STEP, [*like, jax.ShapeDtypeStruct((), jnp.float32)])
    hyper = jnp.stack([jnp.asarray(each, jnp.float32) for each in h])
    *after, norm = call(hyper, *before, *_in_order(pending))
    factors = iter(after)
    return State(*(_adapter(factors) for _ in state)), norm


def _in_order(adapter: Adapter) -> list[Any]:
    pairs = (*(adapter["layers"][name] for name in _MODULES), adapter["head"])
    return [factor for pair in pairs for factor in pair]


def _adapter(factors: Iterator[Any]) -> Adapter:
    layers = {name: (next(factors), next(factors)) for name in _MODULES}
    return {"layers": layers, "head": (next(factors), next(factors))}
