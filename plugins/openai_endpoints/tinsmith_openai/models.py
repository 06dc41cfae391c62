"""The models that a caller can name: base models, and sampler checkpoints that the caller may read."""

from datetime import UTC, datetime
from typing import Final

import tinsmith
from tinsmith.stores import CheckpointRecord, SamplingSessionRecord
from tinsmith_openai.answers import Object
from tinsmith_openai.refusals import NoSuchModelError

_PATH: Final = "tinker://"
_MOST_LISTED: Final = 1000


async def open_model(sampling: tinsmith.RouteSampling, caller: tinsmith.Principal, name: str) -> SamplingSessionRecord:
    """Return the sampling session of `base`, `tinker://...` or `base;tinker://...`.

    Raise NoSuchModelError if the name is no model's, whatever is wrong with it.
    """
    base, separator, path = name.partition(";")
    if not separator and name.startswith(_PATH):
        base, path = "", name
    if not base and not path:
        msg = f"no model named {name!r}; GET /v1/models lists those that there are"
        raise NoSuchModelError(msg)
    try:
        return await sampling.open(caller, base_model=base or None, model_path=path or None)
    except tinsmith.UserError as error:
        if error.http_status not in {400, 404}:  # a limit
            raise
        raise NoSuchModelError(str(error)) from error


async def listed_models(
    settings: tinsmith.Settings, context: tinsmith.RoutesContext, caller: tinsmith.Principal, *, started: int
) -> list[Object]:
    """Return the base models, and the newest of the caller's sampler checkpoints."""
    checkpoints, _ = await context.store.list_checkpoints(caller.tenant, limit=_MOST_LISTED)
    contexts = {model.name: await _context_of(context.sampling, model.name) for model in settings.models}
    now = datetime.now(UTC)
    return [
        *({**_listed(name, started), **length} for name, length in contexts.items()),
        *(
            {**_of_checkpoint(each), **contexts.get(each.base_model, {})}
            for each in checkpoints
            if each.kind == "sampler" and not _expired(each, now)
        ),
    ]


async def _context_of(sampling: tinsmith.RouteSampling, base_model: str) -> Object:
    """Return the length of the context, as vLLM names it: agents shorten conversations before they reach it.

    Nothing until the engine has reported it.
    """
    try:
        return {"max_model_len": await sampling.max_context_tokens(base_model)}
    except tinsmith.CapacityError:
        return {}


def _expired(checkpoint: CheckpointRecord, now: datetime) -> bool:
    return checkpoint.expires_at is not None and checkpoint.expires_at <= now


def _of_checkpoint(checkpoint: CheckpointRecord) -> Object:
    return {**_listed(checkpoint.path, int(checkpoint.created_at.timestamp())), "root": checkpoint.base_model}


def _listed(name: str, created: int) -> Object:
    return {"id": name, "object": "model", "created": created, "owned_by": "tinsmith"}
