"""Checkpoints that no engine writes. Each belongs to a model that only holds it and cannot be trained on."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from tinsmith.checkpoints import saved as checkpoints
from tinsmith.errors import ConflictError, NotFoundError, UserError
from tinsmith.hook_values import Principal
from tinsmith.operations import LoraConfig
from tinsmith.protocol import translate
from tinsmith.server.context import ServerContext
from tinsmith.store import CheckpointRecord, Origin, RunRecord, RunState, SessionRecord


async def ended_session(
    context: ServerContext, caller: Principal, *, project_id: str | None, detail: str, idempotency_key: str | None
) -> SessionRecord:
    """Return a session that has ended, and that nothing else is ever in: for a repeat, the same one."""
    await context.quotas.disk.admit_unowned()
    now = context.now()
    session = SessionRecord(
        session_id=secrets.token_hex(16),
        tenant=caller.tenant,
        created_at=now,
        last_seen_at=now,
        project_id=project_id,
        ended="success",
        end_detail=detail,
    )
    return await context.store.create_session(session, idempotency_key=idempotency_key)


async def holder(
    context: ServerContext,
    session: SessionRecord,
    number: int,
    *,
    base_model: str,
    lora: LoraConfig,
    holds: str,
    copied: CheckpointRecord | None = None,
) -> RunRecord:
    """Return the model of that number. Raises ConflictError if it exists and holds something else."""
    wanted = RunRecord(
        model_id=translate.model_id(session.session_id, number),
        session_id=session.session_id,
        tenant=session.tenant,
        base_model=base_model,
        lora=lora,
        created_at=context.now(),
        last_request_at=context.now(),
        state=RunState.UNLOADED,
        state_reason=f"it holds {holds}, and cannot be trained on",
    )
    found = await context.store.add_unloaded_run(wanted, None if copied is None else _origin(wanted, copied))
    if found.state_reason != wanted.state_reason:
        msg = f"model {found.model_id!r} exists already, for something else; each needs its own model_seq_id"
        raise ConflictError(msg)
    return found


def _origin(run: RunRecord, copied: CheckpointRecord) -> Origin:
    return Origin(
        model_id=run.model_id,
        seq_id=0,
        path=copied.path,
        source_id=copied.model_id,
        step=copied.step,
        created_at=run.created_at,
    )


async def hold(
    context: ServerContext, record: CheckpointRecord, write: Callable[[], Awaitable[object]]
) -> CheckpointRecord:
    """Write a checkpoint's files into its directory, and record it; if that has been done, do nothing.

    Raises UserError if there is no room for it.
    """
    if (known := await _known(context, record.path)) is not None:
        return known
    await context.quotas.admit_checkpoint(record.tenant, record.size_bytes)
    try:
        await write()
        await context.store.add_checkpoint(record)
    except UserError:
        await asyncio.to_thread(checkpoints.delete_checkpoint, context.checkpoint_root, record.directory)
        if (known := await _known(context, record.path)) is None:
            raise
        return known  # a repeat of this request was faster
    finally:
        context.quotas.disk.freed(record.tenant)
    return record


async def _known(context: ServerContext, path: str) -> CheckpointRecord | None:
    try:
        return await context.store.get_checkpoint(path)
    except NotFoundError:
        return None
