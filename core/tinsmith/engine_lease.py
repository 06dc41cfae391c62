"""The lease of an engine: waiting for it as a standby, and renewing it while the engine works."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from tinsmith import life_sign
from tinsmith.errors import LeaseLostError, ServerError
from tinsmith.store import Lease, RequestStore

_RENEWALS: Final = 4  # in the time that a lease lasts
_LOOK_S: Final = 1.0  # how often a standby looks whether the process that it waits for is dead

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    lease: Lease
    replaced: str | None  # how the engine before it ended, where this one has waited for it


async def take_lease(
    store: RequestStore, base_model: str, *, engine_id: str, duration_s: float, directory: Path
) -> Taken:
    """Wait until no other engine serves the base model, however long that takes, and say for whom it waits."""
    dead: str | None = None
    waited_for: str | None = None
    while True:
        found = await store.acquire_lease(base_model, engine_id=engine_id, duration_s=duration_s, dead=dead)
        if isinstance(found, Lease):
            life_sign.forget_ended(directory)
            _log.info("serving %r with epoch %d as %s", base_model, found.epoch, engine_id)
            return Taken(found, _how_it_ended(waited_for, dead))
        if life_sign.has_ended(directory, found.engine_id):
            dead = found.engine_id
            continue
        if waited_for != found.engine_id:
            waited_for = found.engine_id
            _log.info(
                "standby: engine %s serves %r; this one takes over when that one stops, or is silent for %g s",
                waited_for,
                base_model,
                duration_s,
            )
        await store.wait_for_lease(base_model, min(found.remaining_s, _LOOK_S))


def _how_it_ended(waited_for: str | None, dead: str | None) -> str | None:
    if dead is not None:
        return f"the process of engine {dead} died"
    return None if waited_for is None else f"engine {waited_for} stopped, or did not renew its lease in time"


async def keep_lease(store: RequestStore, lease: Lease) -> NoReturn:
    """Renew it until cancelled. Raise LeaseLostError once another engine has taken it."""
    while True:
        await asyncio.sleep(lease.duration_s / _RENEWALS)
        try:
            await store.renew_lease(lease)
        except LeaseLostError:
            raise
        except ServerError as error:
            _log.warning("the lease of %r could not be renewed, trying again: %s", lease.base_model, error)


async def give_back(store: RequestStore, base_model: str, engine_id: str, *, directory: Path) -> None:
    """Let the next engine take it at once. Where the store cannot be reached, it has to see that this one is dead."""
    with suppress(ServerError):
        await store.release_lease(base_model, engine_id)
        life_sign.forget(directory, engine_id)
