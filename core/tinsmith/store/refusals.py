"""What every store says when it refuses something, and how an operation fails that will not run.

The message about an unknown id is the same whether it never existed, was deleted, or belongs to another tenant.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from tinsmith.errors import (
    ConflictError,
    LeaseLostError,
    NotFoundError,
    ResultExpiredError,
    ServerError,
    UserError,
)
from tinsmith.operations import Failed
from tinsmith.store.records.checkpoints import CheckpointRecord
from tinsmith.store.records.engines import Lease
from tinsmith.store.records.operations import NewOperation
from tinsmith.store.records.runs import RecoveryPointRecord, RunState
from tinsmith.store.request_ids import created_at
from tinsmith_checkpoints.values import Json

MAX_METADATA_BYTES: Final = 64 << 10
"""The maximum size of metadata that clients attach to sessions, models and checkpoints: it is kept for long."""

CANCELLED: Final = Failed(message="cancelled by the client")

_FORGOTTEN: Final = frozenset({"session", "model", "sampling session"})


def no_such(what: str, name: str) -> str:
    hint = "; it may have been deleted after its session had ended (server.session_retention_s)"
    return f"no {what} {name!r}{hint if what in _FORGOTTEN else ''}"


def missing(what: str, name: str) -> NotFoundError:
    return NotFoundError(no_such(what, name))


def described_bytes(*values: object) -> int:
    """Return how many bytes what a client says of a thing takes as JSON, in which form it is stored."""
    return sum(len(json.dumps(each)) for each in values if each)


def refuse_large_metadata(metadata: Mapping[str, Json] | None) -> None:
    """Raise UserError if the metadata takes too many bytes as JSON, in which form it is stored."""
    size = described_bytes(metadata)
    if size > MAX_METADATA_BYTES:
        msg = (
            f"user_metadata takes {size} bytes as stored; allowed: {MAX_METADATA_BYTES} (a character that is not ASCII "
            "takes 6 or 12); keep large values elsewhere"
        )
        raise UserError(msg)


# operations that are refused


def no_request(request_id: str, pruned_before: datetime | None) -> NotFoundError | ResultExpiredError:
    """`pruned_before`: operations that finished before then have been removed; None: none have been."""
    made_at = created_at(request_id)
    if made_at is not None and pruned_before is not None and made_at < pruned_before:
        return ResultExpiredError(f"the result of request {request_id!r} is past its retention; send the request again")
    return NotFoundError(f"no request {request_id!r}")


def used_already(operation: NewOperation) -> ConflictError:
    return ConflictError(
        f"seq_id {operation.seq_id} of {operation.subject_id!r} was already used by a request with other content; "
        "every request needs a seq_id of its own"
    )


def pruned_already(operation: NewOperation) -> ResultExpiredError:
    return ResultExpiredError(
        f"the result of seq_id {operation.seq_id} of {operation.subject_id!r} is past its retention"
    )


def session_ended(session_id: str, ended: str, detail: str | None) -> UserError:
    more = f": {detail}" if detail else ""
    return UserError(f"session {session_id!r} has ended ({ended}{more}); create a new one")


def unloaded(model_id: str) -> UserError:
    return UserError(f"model {model_id!r} has been unloaded (unload_model); create a new one")


def cursor_ahead(subject_id: str, cursor: int, last: int) -> UserError:
    return UserError(
        f"cursor {cursor} of {subject_id!r} is ahead of everything that this server has recorded ({last}), so its "
        "database must have been replaced; create a new sampling client"
    )


# operations that fail


def too_late(operation: NewOperation, next_seq_id: int) -> Failed:
    return Failed(
        message=f"seq_id {operation.seq_id} of {operation.subject_id!r} arrived after the model had gone on "
        f"without it, to seq_id {next_seq_id}; send requests in order, or sooner",
    )


def lost(model_id: str, reason: str | None) -> Failed:
    return Failed(
        message=f"model {model_id!r} is lost: {reason or 'its engine ended'}; create a new one, from a checkpoint if "
        "there is one",
        category="server",
    )


def no_engine(base_model: str, detail: str) -> Failed:
    return Failed(message=f"base model {base_model!r} cannot be served: {detail}", category="server")


def behind_a_gap(model_id: str, missing: int, state: RunState, *, unloads: bool) -> Failed:
    """Of a model that is not lost. `unloads`: an UnloadModel took the missing seq_id."""
    if unloads:
        rest = "its session has ended, or unload_model was called"
    elif state == RunState.UNLOADED:
        rest = "the model has been unloaded"
    else:
        rest = "the model continues with the next request"
    return Failed(
        message=f"seq_id {missing} of {model_id!r} never arrived, so the requests that waited behind it "
        f"were not run; {rest}"
    )


def ended_too_often(kind: str, times: int, reason: str) -> Failed:
    message = f"the engine ended {times} times while this {kind} ran, so it is not tried again: {reason}"
    return Failed(message=message, category="server")


# what else is refused


def taken(sampling_session_id: str, content: str) -> ConflictError:
    """Return the error for using the id of a sampling session again, for other content."""
    return ConflictError(
        f"sampling session {sampling_session_id!r} exists already, for {content!r}; each needs its own "
        f"sampling_session_seq_id"
    )


def lease_lost(lease: Lease, engine_id: str | None, epoch: int | None) -> LeaseLostError:
    """`engine_id` and `epoch`: who holds it now."""
    now = "nobody" if engine_id is None else f"engine {engine_id!r} with epoch {epoch}"
    return LeaseLostError(
        f"engine {lease.engine_id!r} of {lease.base_model!r} no longer holds its lease (epoch {lease.epoch}): "
        f"{now} holds it; nothing that this engine does is recorded any more"
    )


def no_checkpoint(path: str) -> NotFoundError:
    return NotFoundError(f"no checkpoint {path!r}")


def checkpoint_exists(path: str) -> UserError:
    return UserError(f"checkpoint {path!r} exists already; choose another name")


def version_gone(read: CheckpointRecord) -> NotFoundError:
    return NotFoundError(f"checkpoint {read.path!r} has been replaced, deleted or changed since it was read")


def model_not_live(record: RecoveryPointRecord) -> ServerError:
    return ServerError(f"model {record.model_id!r} is not live, so its recovery point is not kept")


def ahead_of_results(record: RecoveryPointRecord, applied_seq_id: int) -> ServerError:
    return ServerError(
        f"a recovery point of {record.model_id!r} at seq_id {record.seq_id} is ahead of the recorded results, "
        f"which end at {applied_seq_id}"
    )
