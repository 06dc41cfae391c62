"""The type of what Megatron hands over."""

from typing import Any, TypeAlias

Untyped: TypeAlias = Any
"""A configuration, a spec, a layer or an argument of Megatron-core, which has no types."""
