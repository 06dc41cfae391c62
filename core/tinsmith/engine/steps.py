"""The steps of each model: how many it has made, and whether the next one must be discarded.

Every metric gets its step. A run that starts from a state goes on with that state's count, and a load moves the count
forward only: a model that goes back to an older state, to try again, continues its curve instead of drawing a second
line over it.

The passes of a model since its last step form a window. If one of them has failed, the step would apply a
part of what its client meant, so it is refused, and the gradient is dropped. The decision is a function of the log,
whichever engine takes it. An engine notes the operations that it runs, and asks the store for others: operations before
its start, and requests that were refused when they were submitted.
"""

from dataclasses import dataclass, field

from tinsmith import operations as ops
from tinsmith.engine.failures import with_retries
from tinsmith.store import FailedPass, OperationRecord, RequestStore

_CLEARING = frozenset({"create_model", "optim_step", "load_state"})  # the pending gradient


@dataclass(slots=True)
class _Window:
    seen: int  # the last seq_id that was noted
    unread: list[tuple[int | None, int]] = field(default_factory=list)  # between which numbers the store must be asked
    failed: FailedPass | None = None


class Steps:
    """Belongs to one engine, which is told of everything that it runs, in order."""

    def __init__(self, store: RequestStore) -> None:
        self._store = store
        self._made: dict[str, int] = {}  # by model_id
        self._windows: dict[str, _Window] = {}  # by model_id

    def rebuilt(self, model_id: str, made: int) -> None:
        """Continue with a count that is recorded."""
        self._made[model_id] = made

    def ran(self, record: OperationRecord, result: ops.Result, loaded: int) -> tuple[int, int]:
        """Note an operation of a model. Return its step, and how many its model has made after it.

        `loaded`: the steps of the state that the operation has loaded, if it has.
        """
        before = self._made.get(record.subject_id, 0)
        after = max(before, loaded) + isinstance(result, ops.OptimStepOutput)
        if record.kind == "unload_model":
            self._made.pop(record.subject_id, None)
            self._windows.pop(record.subject_id, None)
        else:
            self._made[record.subject_id] = after
            self._note(record, result)
        return before, after

    def _note(self, record: OperationRecord, result: ops.Result) -> None:
        failure = result if isinstance(result, ops.Failed) else None
        if record.kind in _CLEARING and (failure is None or failure.gradient_dropped):
            self._windows[record.subject_id] = _Window(record.seq_id)
            return
        window = self._reached(record)
        if failure is not None and record.kind == "forward_backward" and window.failed is None:
            window.failed = FailedPass(seq_id=record.seq_id, request_id=record.request_id, failure=failure)

    async def failed_pass(self, record: OperationRecord) -> FailedPass | None:
        """Return a pass that has failed in the window of an operation that is about to run."""
        window = self._reached(record)
        for after, before in window.unread:
            found = await with_retries(
                self._store.failed_pass, record.subject_id, after_seq_id=after, before_seq_id=before
            )
            if found is not None and (window.failed is None or found.seq_id < window.failed.seq_id):
                window.failed = found
        window.unread.clear()
        return window.failed

    def _reached(self, record: OperationRecord) -> _Window:
        """Return the model's window up to this operation. Operations between it and the last seen one are unknown."""
        window = self._windows.get(record.subject_id)
        if window is None:
            window = self._windows[record.subject_id] = _Window(record.seq_id, [(None, record.seq_id)])
        elif record.seq_id > window.seen + 1:
            window.unread.append((window.seen, record.seq_id))
        window.seen = record.seq_id
        return window


def discarded(failed: FailedPass) -> ops.Failed:
    """Return the refusal of a step whose window holds a failed pass."""
    request = f"request {failed.request_id}: {failed.failure.message}"
    return ops.Failed(
        message=f"this step is discarded, because a pass since the last one failed or never arrived ({request}). "
        "The gradient is dropped, weights and moments are as before; send all passes of the step again",
        category=failed.failure.category,
        gradient_dropped=True,
    )
