"""Request ids: `req-<microseconds since 1970, hex>-<random, hex>`. The time tells pruned requests from unknown ones."""

import secrets
from datetime import UTC, datetime
from typing import Final

_PREFIX: Final = "req-"
_TIME_DIGITS, _RANDOM_BYTES = 14, 12


def new_request_id(now: datetime) -> str:
    return f"{_PREFIX}{int(now.timestamp() * 1_000_000):0{_TIME_DIGITS}x}-{secrets.token_hex(_RANDOM_BYTES)}"


def created_at(request_id: str) -> datetime | None:
    """Return when a request was made; None if `request_id` was not made by `new_request_id`."""
    time, _, rest = request_id.removeprefix(_PREFIX).partition("-")
    if not request_id.startswith(_PREFIX) or len(time) != _TIME_DIGITS or len(rest) != 2 * _RANDOM_BYTES:
        return None
    try:
        return datetime.fromtimestamp(int(time, 16) / 1_000_000, UTC)
    except (ValueError, OverflowError):
        return None
