"""Names of base models: `BASE:peft:N` is how the hosted service calls BASE with a context of N tokens."""

import re
from typing import Final

from tinsmith.errors import CapacityError, UserError
from tinsmith.server.context import ServerContext

_LONG: Final = re.compile(r"(?P<base>.+):peft:(?P<tokens>[0-9]{1,12})")


async def base_of(context: ServerContext, name: str) -> str:
    """Return the configured base model of a name with a context length; any other name as it is.

    Raises UserError if the context here is shorter, and CapacityError as long as that is not known.
    """
    configured = {model.name for model in context.settings.models}
    found = _LONG.fullmatch(name)
    if found is None or name in configured or found["base"] not in configured:
        return name
    base, tokens = found["base"], int(found["tokens"])
    capabilities = await context.engines.capabilities(base)
    if capabilities is None:
        msg = f"the context length of {base!r} is not known until the model has loaded; try again"
        raise CapacityError(msg, queue_state="paused_capacity")
    offered = capabilities.trainer.max_context_tokens
    if tokens > offered:
        msg = f"{name!r} asks for a context of {tokens} tokens, and {base!r} has {offered}; use base_model {base!r}"
        raise UserError(msg)
    return base
