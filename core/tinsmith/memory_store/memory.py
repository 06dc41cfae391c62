"""Memory: the tables that the stores of one process share, across event loops.

Nothing here waits, and everything is called under `Memory.lock`, so each method of the store is one transaction.
Subjects refuse before they change anything, so a transaction that raises has no effect. What waits is scanned: what a
claim costs grows with it.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime

from tinsmith.memory_store.rows import LeaseRow, Operation, Run, Samples, Session
from tinsmith.store import (
    AuditEntry,
    CheckpointRecord,
    EngineRecord,
    IssuedKey,
    ReportedFigures,
    SamplingSessionRecord,
    refusals,
)


class Memory:
    """Each method finds rows. Those that look for one raise NotFoundError if it does not exist."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.told: list[str] = []  # the topics that the running transaction tells
        self.tell_all: list[Callable[[list[str]], None]] = []  # who is told, from any thread
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, SamplingSessionRecord] = {}
        self.custom_losses: dict[tuple[str, int], bytes] = {}  # by session and number
        self.checkpoints: dict[str, CheckpointRecord] = {}
        self.deleted_checkpoints: dict[str, tuple[CheckpointRecord, datetime]] = {}
        self.operations: dict[str, Operation] = {}
        self.unfinished: dict[str, Operation] = {}  # in order of arrival
        self.of_subject: dict[str, dict[int, Operation]] = {}  # none is empty
        self.samples: dict[tuple[str, int], Samples] = {}  # by sampling session and clone
        self.untold: defaultdict[str, list[str]] = defaultdict(list)  # cancelled while they ran, by base model
        self.leases: dict[str, LeaseRow] = {}
        self.engines: dict[str, EngineRecord] = {}
        self.figures: dict[str, ReportedFigures] = {}
        self.usage: defaultdict[tuple[datetime, str, str], Counter[str]] = defaultdict(Counter)
        self.audit: list[AuditEntry] = []
        self.api_keys: dict[str, IssuedKey] = {}  # by id
        self.ended_logins: dict[str, datetime] = {}  # until when each would have lasted
        self.experts: dict[tuple[str, str, bytes], tuple[bytes, datetime]] = {}  # oldest first
        self.secrets: dict[str, bytes] = {}
        self.pruned_before: datetime | None = None
        self.last_id = 0  # of an operation

    def session(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise refusals.missing("session", session_id)
        return self.sessions[session_id]

    def run(self, model_id: str) -> Run:
        if model_id not in self.runs:
            raise refusals.missing("model", model_id)
        return self.runs[model_id]

    def operation(self, request_id: str) -> Operation:
        if request_id not in self.operations:
            raise refusals.no_request(request_id, self.pruned_before)
        return self.operations[request_id]

    def checkpoint(self, path: str) -> CheckpointRecord:
        if path not in self.checkpoints:
            raise refusals.no_checkpoint(path)
        return self.checkpoints[path]

    def log(self, subject_id: str) -> dict[int, Operation]:
        """Return the operations of a model or sampling session by seq_id, to read."""
        return self.of_subject.get(subject_id, {})

    def pending(self, subject_id: str) -> list[Operation]:
        """Return what a model has queued or running, in order."""
        found = [each for each in self.unfinished.values() if each.record.subject_id == subject_id]
        return sorted(found, key=lambda each: each.record.seq_id)
