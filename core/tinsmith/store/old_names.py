"""Deprecated: names of earlier versions, so that store plugins built against those still import and run."""

from typing import Final

from tinsmith.store.records import (
    RecoveryPointRecord,
    RecoveryPointTaken,
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
