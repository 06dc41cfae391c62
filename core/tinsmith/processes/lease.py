"""The lease of an engine: a standby waits for it, and a working engine renews it.

A waiting engine sees that the other one is dead before its lease expires: every engine locks a file of its own in the
data directory, and the kernel releases the lock when the process dies, however it dies. A free lock proves death only
to processes under the same kernel, so the file names the boot of its kernel. An engine on another machine, or after a
reboot, waits for the lease.
"""

import asyncio
import fcntl
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from tinsmith.errors import LeaseLostError, ServerError
from tinsmith.store import Lease, LeaseHeld, RequestStore

_RENEWALS: Final = 4  # during the time that a lease lasts
_LOOK_S: Final = 1.0  # how often a standby checks whether the process that it waits for is dead
_SUFFIX: Final = ".alive"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    lease: Lease
    replaced: str | None  # how the previous engine ended, if this one waited for it


async def take_lease(
    store: RequestStore, base_model: str, *, engine_id: str, duration_s: float, directory: Path
) -> Taken:
    """Wait until no other engine serves the base model, however long that takes, then take the lease.

    An engine that has not renewed its lease for `duration_s`, by the clock of this process, counts as dead even if its
    lease has not expired by the store's clock, because that clock may have been set back.
    """
    gone: str | None = None  # the engine to replace although its lease has not expired
    how: str | None = None
    waited_for: str | None = None
    silence = Silence()
    while True:
        found = await store.acquire_lease(base_model, engine_id=engine_id, duration_s=duration_s, dead=gone)
        if isinstance(found, Lease):
            forget_ended(directory)
            _log.info("serving %r with epoch %d as %s", base_model, found.epoch, engine_id)
            if how is None and waited_for is not None:
                how = f"engine {waited_for} stopped or did not renew its lease in time"
            return Taken(found, how)
        if has_ended(directory, found.engine_id):
            gone, how = found.engine_id, f"the process of engine {found.engine_id} died"
            continue
        if silence.lasts_s(found) >= duration_s:
            gone, how = found.engine_id, f"engine {found.engine_id} has not renewed its lease for {duration_s:g} s"
            _log.warning("%s, although it expires at %s: the database's clock was set back", how, found.until)
            continue
        if waited_for != found.engine_id:
            waited_for = found.engine_id
            _log.info(
                "standby: engine %s serves %r; this one takes over if that one stops or is silent for %g s",
                waited_for,
                base_model,
                duration_s,
            )
        await store.wait_for_lease(base_model, min(found.remaining_s, _LOOK_S))


class Silence:
    """Measures for how long nobody has renewed a lease, by the monotonic clock of this process."""

    def __init__(self) -> None:
        self._seen: LeaseHeld | None = None
        self._since_s = 0.0

    def lasts_s(self, found: LeaseHeld) -> float:
        now_s = time.monotonic()
        if self._seen is None or (self._seen.engine_id, self._seen.until) != (found.engine_id, found.until):
            self._seen, self._since_s = found, now_s
        return now_s - self._since_s


async def hold_lease(
    store: RequestStore,
    lease: Lease,
    work: Coroutine[Any, Any, None],
    on_lost: Callable[[LeaseLostError], object] | None,
) -> None:
    """Renew the lease while the work runs. If it is lost, call `on_lost`, cancel the work and raise LeaseLostError."""
    working, keeping = asyncio.create_task(work), asyncio.create_task(keep_lease(store, lease))
    try:
        await asyncio.wait([working, keeping], return_when=asyncio.FIRST_COMPLETED)
        await (working if working.done() else keeping)
    except LeaseLostError as error:
        if on_lost is not None:
            on_lost(error)
        raise
    finally:
        for task in (working, keeping):
            task.cancel()
        await asyncio.wait([working, keeping])


async def keep_lease(store: RequestStore, lease: Lease) -> NoReturn:
    """Renew the lease until cancelled. Raise LeaseLostError once another engine has taken it."""
    while True:
        await asyncio.sleep(lease.duration_s / _RENEWALS)
        try:
            await store.renew_lease(lease)
        except LeaseLostError:
            raise
        except ServerError as error:
            _log.warning("cannot renew the lease of %r, trying again: %s", lease.base_model, error)


async def give_back(store: RequestStore, base_model: str, engine_id: str, *, directory: Path) -> None:
    """Release the lease for the next engine, which sees the end of this process if the store cannot be reached."""
    with suppress(ServerError):
        await store.release_lease(base_model, engine_id)
        forget(directory, engine_id)


@contextmanager
def life_sign(directory: Path, engine_id: str) -> Iterator[None]:
    """Use it from before the engine asks for its lease until the process ends."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = _sign(directory, engine_id)
    fresh = path.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(running_kernel())
        file.flush()
        fresh.rename(path)  # a file of this name is always locked by a living process
        yield


def has_ended(directory: Path, engine_id: str) -> bool:
    """Return whether that engine is certainly dead. False if it lives or nothing is known."""
    kernel = running_kernel()
    try:
        with _sign(directory, engine_id).open() as file:
            if not kernel or file.read() != kernel:
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except OSError:  # there is no file, or it is locked
        return False


def forget(directory: Path, engine_id: str) -> None:
    """Remove the file of an engine that has released its lease."""
    _sign(directory, engine_id).unlink(missing_ok=True)


def forget_ended(directory: Path) -> None:
    """Remove the files of dead engines."""
    for path in directory.glob(f"*{_SUFFIX}"):
        if has_ended(directory, path.stem):
            path.unlink(missing_ok=True)


def _sign(directory: Path, engine_id: str) -> Path:
    return directory / f"{engine_id}{_SUFFIX}"


def running_kernel() -> str:
    """Return an id of this boot of this machine, empty if it is unknown."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
