"""The type of what JAX computes with."""

from typing import Any, TypeAlias

Jax: TypeAlias = Any
"""A jax array, a tracer of one, a reference to one in a kernel; or a pytree of these, of their shapes or their specs.

JAX has no static types for these that a function could state.
"""
