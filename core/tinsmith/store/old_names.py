"""Deprecated: names of earlier versions, so that store plugins built against those still import and run."""

from functools import wraps
from typing import Any, Final

from tinsmith.store.records import (
    LiveModel,
    NewOperation,
    OperationRecord,
    RecoveryPointRecord,
    RecoveryPointTaken,
    RunLog,
    SamplingSessionCreated,
    SamplingSessionRecord,
)

SamplerCreated = SamplingSessionCreated
SamplerRecord = SamplingSessionRecord
SnapshotRecord = RecoveryPointRecord
SnapshotTaken = RecoveryPointTaken

_METHODS: Final = {
    "create_sampler": "create_sampling_session",
    "get_sampler": "get_sampling_session",
    "list_samplers": "list_sampling_sessions",
    "add_snapshot": "add_recovery_point",
    "list_snapshots": "list_recovery_points",
    "drop_snapshot": "drop_recovery_point",
}


class TakesOldNames:
    """Makes each renamed method available under both names, in whichever class defines it.

    So an override under the old name is called, and finds the method that it overrides with `super()`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for old, new in _METHODS.items():
            for given, other in ((old, new), (new, old)):
                method = vars(cls).get(given)
                if other not in vars(cls) and method and not getattr(method, "__isabstractmethod__", False):
                    setattr(cls, other, method)


def _also_called(record: Any, old: str, new: str) -> None:  # Any: a class whose constructor is replaced
    """Let the field `new` be read, and passed to the constructor, as `old`."""
    create = record.__init__

    @wraps(create)
    def create_by_either_name(self: object, *args: Any, **fields: Any) -> None:
        if old in fields:
            fields[new] = fields.pop(old)
        create(self, *args, **fields)

    def read(self: object) -> object:
        return getattr(self, new)

    record.__init__ = create_by_either_name
    setattr(record, old, property(read))


_also_called(NewOperation, "stream", "subject_id")
_also_called(OperationRecord, "stream", "subject_id")
_also_called(LiveModel, "snapshots", "recovery_points")
_also_called(RunLog, "snapshots", "recovery_points")
