"""Counts the optimizer steps of each model, so that every metric gets its step.

A run that starts from a state goes on with that state's count, and a load moves the count forward only: a model that
goes back to an older state, to try again, continues its curve instead of drawing a second line over it.
"""

from collections.abc import Mapping

from tinsmith import operations as ops
from tinsmith.store import OperationRecord


class Steps:
    """Belongs to one engine, which is told of everything that it runs, in order."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}  # by model_id

    def rebuilt(self, model_id: str, made: int) -> None:
        """Continue with a count that is recorded."""
        self._made[model_id] = made

    def ran(self, record: OperationRecord, result: ops.Result, loaded: int) -> tuple[int, int]:
        """Return the step of an operation, and how many its model has made after it.

        `loaded`: the steps of the state that the operation has loaded, if it has.
        """
        before = self._made.get(record.subject_id, 0)
        after = max(before, loaded)
        if isinstance(result, ops.OptimStepOutput):
            after += 1
        if record.kind == "unload_model":
            self._made.pop(record.subject_id, None)
        else:
            self._made[record.subject_id] = after
        return before, after


def metrics_of(operation: ops.Operation | None, result: ops.Result) -> Mapping[str, float]:
    """Return the metrics of a pass or a step. Those of a pass without a gradient get a name of their own."""
    if not isinstance(result, ops.ForwardBackwardOutput | ops.OptimStepOutput):
        return {}
    if isinstance(operation, ops.Forward):
        return {f"forward/{name}": value for name, value in result.metrics.items()}
    return result.metrics
