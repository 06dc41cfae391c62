"""A bound for the metadata that clients attach to sessions, models and checkpoints. It is kept for ever, or nearly."""

import json
from collections.abc import Mapping
from typing import Final

from tinsmith.errors import UserError
from tinsmith.json_values import Json

MAX_METADATA_BYTES: Final = 64 << 10


def refuse_large_metadata(metadata: Mapping[str, Json] | None) -> None:
    """Raise UserError if the metadata takes too many bytes as JSON, in which form it is stored."""
    size = len(json.dumps(metadata)) if metadata else 0
    if size > MAX_METADATA_BYTES:
        msg = (
            f"user_metadata takes {size} bytes as stored; allowed: {MAX_METADATA_BYTES} (a character that is not ASCII "
            "takes 6 or 12); keep large values elsewhere"
        )
        raise UserError(msg)
