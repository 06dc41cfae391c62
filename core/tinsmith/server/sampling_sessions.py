"""Opens sampling sessions: on a base model, or on a sampler checkpoint that the caller may read."""

from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.errors import CapacityError, NotFoundError, UserError
from tinsmith.hook_values import Principal
from tinsmith.protocol import translate
from tinsmith.server.auth import readable_checkpoint
from tinsmith.server.context import ServerContext
from tinsmith.store import SamplingSessionRecord
from tinsmith.store.refusals import taken


async def open_sampling_session(
    context: ServerContext,
    caller: Principal,
    *,
    session_id: str,
    number: int,
    base_model: str | None,
    model_path: str | None,
) -> SamplingSessionRecord:
    """Open one in the caller's session, or return the one that has this number there.

    Raises UserError if it cannot be opened, ConflictError if the number is taken by something else, CapacityError if
    the tenant has too many.
    """
    path = None if model_path is None else _sampler_path(model_path)
    if path is None and base_model is None:
        msg = "base_model and model_path are both missing; send one of them"
        raise UserError(msg)
    checkpoint = None if path is None else await readable_checkpoint(context, caller, str(path), base_model=base_model)
    name = base_model or "" if checkpoint is None else checkpoint.base_model
    context.settings.model(name)  # raises UserError if it is not served
    wanted = SamplingSessionRecord(
        sampling_session_id=translate.sampling_session_id(session_id, number),
        session_id=session_id,
        tenant=caller.tenant,
        base_model=name,
        created_at=context.now(),
        snapshot_id=None if path is None else str(path),
        model_path=None if path is None else str(path),
        model_id=None if path is None else path.model_id,
        checkpoint_created_at=None if checkpoint is None else checkpoint.created_at,
        only_while_public=checkpoint is not None and checkpoint.tenant != caller.tenant and not caller.admin,
    )
    await _admit(context, wanted)
    sampler = await context.store.create_sampling_session(wanted)
    _refuse_other_content(sampler, wanted)
    return sampler


async def _admit(context: ServerContext, wanted: SamplingSessionRecord) -> None:
    """A repeat needs no room. Raises CapacityError if the tenant has too many."""
    try:
        await context.quotas.admit_sampling_session(wanted.tenant)
    except CapacityError:
        try:
            await context.store.get_sampling_session(wanted.sampling_session_id)
        except NotFoundError:
            pass
        else:
            return
        raise


def _refuse_other_content(first: SamplingSessionRecord, wanted: SamplingSessionRecord) -> None:
    """A number names one sampling session for ever. Raises ConflictError if it was used for something else."""
    if (first.base_model, first.snapshot_id) != (wanted.base_model, wanted.snapshot_id):
        raise taken(first.sampling_session_id, first.snapshot_id or first.base_model)


def _sampler_path(text: str) -> TinkerPath:
    path = TinkerPath.parse(text)
    if path.kind != "sampler":
        msg = (
            f"model_path {text!r} is not a sampler checkpoint; pass the path that save_weights_for_sampler returned "
            "(tinker://.../sampler_weights/...)"
        )
        raise UserError(msg)
    return path
