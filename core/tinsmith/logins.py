"""For plugins by which people sign in."""

from tinsmith.hook_values import LoginSpec
from tinsmith.store import AuditEntry
from tinsmith.store.logins import LONGEST, Login, end_account, has_ended

__all__ = ["LONGEST", "AuditEntry", "Login", "LoginSpec", "end_account", "has_ended"]
