"""The request store's interface: the records that it holds, and the classes that a store plugin implements."""

from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.claim_room import Claim, Claimable, ClaimRoom, Held
from tinsmith.store.engine_log import EngineLog
from tinsmith.store.engine_states import EngineStates
from tinsmith.store.leases import Leases
from tinsmith.store.log_inspection import LogInspection
from tinsmith.store.model_places import ModelPlaces
from tinsmith.store.old_names import SamplerCreated as SamplerCreated
from tinsmith.store.old_names import SamplerRecord as SamplerRecord
from tinsmith.store.old_names import SnapshotRecord as SnapshotRecord
from tinsmith.store.old_names import SnapshotTaken as SnapshotTaken
from tinsmith.store.records import (
    MANY_AHEAD,
    SEQ_IDS_PER_CLONE,
    WAITS_FOR_PLACE,
    CheckpointKind,
    CheckpointRecord,
    CheckpointWritten,
    Completion,
    ConsistencyCounts,
    DeviceTurn,
    Effect,
    EngineRecord,
    EngineState,
    ExpertsSampled,
    FinishedSample,
    FinishedSamples,
    KeptCheckpoints,
    Lease,
    LeaseHeld,
    LiveModel,
    LoggedOperation,
    LogTotals,
    LoraResolved,
    Metadata,
    NewOperation,
    OperationRecord,
    OperationState,
    PendingCounts,
    PlaceLimits,
    PlaceWait,
    RecoveryPointRecord,
    RecoveryPointTaken,
    RunLog,
    RunRecord,
    RunState,
    RunStateChanged,
    SamplingSessionCreated,
    SamplingSessionRecord,
    SessionEnd,
    SessionRecord,
    Side,
    StoredCheckpoints,
    Usage,
    UsageRecord,
    Waiting,
)
from tinsmith.store.recovery import Recovery
from tinsmith.store.request_store import RequestStore, StoreContext, StoreSpec
from tinsmith.store.routed_experts import RoutedExperts
from tinsmith.store.runs import Runs
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.server_log import ServerLog
from tinsmith.store.sessions import Sessions
from tinsmith.store.usage import UsageLog

__all__ = [
    "MANY_AHEAD",
    "SEQ_IDS_PER_CLONE",
    "WAITS_FOR_PLACE",
    "CheckpointKind",
    "CheckpointRecord",
    "CheckpointWritten",
    "Checkpoints",
    "Claim",
    "ClaimRoom",
    "Claimable",
    "Completion",
    "ConsistencyCounts",
    "DeviceTurn",
    "Effect",
    "EngineLog",
    "EngineRecord",
    "EngineState",
    "EngineStates",
    "ExpertsSampled",
    "FinishedSample",
    "FinishedSamples",
    "Held",
    "KeptCheckpoints",
    "Lease",
    "LeaseHeld",
    "Leases",
    "LiveModel",
    "LogInspection",
    "LogTotals",
    "LoggedOperation",
    "LoraResolved",
    "Metadata",
    "ModelPlaces",
    "NewOperation",
    "OperationRecord",
    "OperationState",
    "PendingCounts",
    "PlaceLimits",
    "PlaceWait",
    "Recovery",
    "RecoveryPointRecord",
    "RecoveryPointTaken",
    "RequestStore",
    "RoutedExperts",
    "RunLog",
    "RunRecord",
    "RunState",
    "RunStateChanged",
    "Runs",
    "SamplingSessionCreated",
    "SamplingSessionRecord",
    "SamplingSessions",
    "ServerLog",
    "SessionEnd",
    "SessionRecord",
    "Sessions",
    "Side",
    "StoreContext",
    "StoreSpec",
    "StoredCheckpoints",
    "Usage",
    "UsageLog",
    "UsageRecord",
    "Waiting",
]
