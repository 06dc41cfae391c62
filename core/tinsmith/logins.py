"""For plugins by which people sign in."""

from tinsmith.hook_values import LoginSpec

__all__ = ["LoginSpec"]
