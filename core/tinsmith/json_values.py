"""JSON: values of which nothing is known before they have been checked."""

from typing import Any, TypeAlias

Json: TypeAlias = Any
"""A value of JSON that has not been checked."""
