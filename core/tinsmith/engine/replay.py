"""Running a recorded operation once more, for what it does to its model, and comparing what it returns."""

from tinsmith.engine.execution import Execution
from tinsmith.engine.replay_comparison import difference
from tinsmith.errors import ModelLostError
from tinsmith.store import OperationRecord
from tinsmith.store.codec import decode_operation, decode_result

CHANGING = frozenset({"create_model", "forward_backward", "optim_step", "load_state"})
"""The operations that change training state."""


async def replay(execution: Execution, record: OperationRecord) -> str | None:
    """Replay one of CHANGING; say how its result differs from the recorded one, None where every bit agrees.

    Raise ModelLostError where its content is gone.
    """
    if record.payload is None:
        msg = f"its log is incomplete: the {record.kind} with seq_id {record.seq_id} has no content any more"
        raise ModelLostError(msg)
    replayed = await execution.replay(decode_operation(record.kind, record.payload), record)
    if record.result_kind is None or record.result is None:
        return None
    differs = difference(decode_result(record.result_kind, record.result), replayed)
    return None if differs is None else f"{record.kind} with seq_id {record.seq_id}, {differs}"
