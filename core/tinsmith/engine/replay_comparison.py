"""Comparing the result of a replayed operation with the recorded one, bit for bit.

An older version may have recorded fewer outputs and metrics than are computed now.
"""

from collections.abc import Mapping

import numpy as np

from tinsmith import operations as ops
from tinsmith.operations import Array


def difference(recorded: ops.Result, replayed: ops.Result) -> str | None:
    """Describe how the two differ. Return None if every bit agrees."""
    match recorded, replayed:
        case ops.Failed(), _:
            return None  # its result was too large to record
        case ops.ForwardBackwardOutput(), ops.ForwardBackwardOutput():
            return _outputs(recorded, replayed)
        case ops.OptimStepOutput(), ops.OptimStepOutput():
            return _largest(_metrics(recorded.metrics), _metrics(replayed.metrics))
        case _:
            return None if recorded == replayed else f"recorded {recorded}, now {replayed}"


def _outputs(recorded: ops.ForwardBackwardOutput, replayed: ops.ForwardBackwardOutput) -> str | None:
    if len(recorded.loss_fn_outputs) != len(replayed.loss_fn_outputs):
        return f"recorded {len(recorded.loss_fn_outputs)} outputs, now {len(replayed.loss_fn_outputs)}"
    return _largest(_arrays(recorded), _arrays(replayed))


def _arrays(output: ops.ForwardBackwardOutput) -> dict[str, Array]:
    named = {
        f"{name} of datum {index}": array
        for index, datum in enumerate(output.loss_fn_outputs)
        for name, array in datum.items()
    }
    return named | _metrics(output.metrics)


def _metrics(metrics: Mapping[str, float]) -> dict[str, Array]:
    return {f"metric {name!r}": np.array(value, np.float64) for name, value in metrics.items()}


def _largest(recorded: Mapping[str, Array], replayed: Mapping[str, Array]) -> str | None:
    if missing := sorted(recorded.keys() - replayed.keys()):
        return f"only what was recorded has {', '.join(missing[:5])}"
    worst: tuple[float, str] | None = None
    for name, before in recorded.items():
        after = replayed[name]
        if before.shape != after.shape or before.dtype != after.dtype:
            return f"{name} was {before.dtype}{before.shape}, now {after.dtype}{after.shape}"
        if before.tobytes() != after.tobytes():
            size = _distance(before, after)
            if worst is None or not size <= worst[0]:  # NaN counts as the largest
                worst = size, name
    return None if worst is None else f"by {worst[0]:.3g} in {worst[1]}"


def _distance(before: Array, after: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.max(np.abs(before.astype(np.float64) - after.astype(np.float64))))
