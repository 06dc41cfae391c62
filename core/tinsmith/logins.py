"""For plugins by which people sign in."""

from tinsmith.hook_values import LoginSpec
from tinsmith.store import AuditEntry

__all__ = ["AuditEntry", "LoginSpec"]
