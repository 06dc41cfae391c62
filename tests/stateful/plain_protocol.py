"""The protocol as one client may rely on it: a plain model, written apart from the store and the engine.

One model's operations are applied in seq_id order, each once, at the moment at which nothing is missing before it. A
step is discarded if a pass since the last one failed. The answers come from a backend of its own, which sees one
operation after the other, and never dies.
"""

import asyncio
from dataclasses import dataclass, field, replace

from tinsmith import operations as ops
from tinsmith.backend import ModelState
from tinsmith.builtin.toy_backend import ToyBackend
from tinsmith.engine.models import completed
from tinsmith.store.codec import encode_operation

POISON = 13  # a token that kills the engine
KILLED = ops.Failed(message="the engine ended ", category="server")
"""The answer to what holds POISON, once it has killed MAX_KILLS engines."""
MAX_KILLS = 3
REFUSED = ops.Failed(message="no such loss")
"""The answer to a pass with a loss that there is not, as soon as it is submitted."""


def refusal_of(operation: ops.Operation) -> ops.Failed | None:
    return REFUSED if isinstance(operation, ops.ForwardBackward) and operation.loss_fn == "none" else None


@dataclass
class Entry:
    operation: ops.Operation
    request_id: str
    answer: ops.Result | None = None  # None while a number before it is missing
    behind_a_gap: bool = False  # it failed, because a number before it never came

    @property
    def gradient_dropped(self) -> bool:
        return isinstance(self.answer, ops.Failed) and self.answer.gradient_dropped


@dataclass
class PlainModel:
    """`backend` is shared by all; no operation of one model can be seen in another."""

    model_id: str
    backend: ToyBackend
    entries: dict[int, Entry] = field(default_factory=dict)
    next_seq_id: int = 0  # the first that is missing
    checkpoints: dict[str, ModelState] = field(default_factory=dict)
    published: list[str] = field(default_factory=list)
    ended: bool = False

    def says(self, seq_id: int, operation: ops.Operation) -> str:
        """Return what becomes of a submit: new, same, conflict, or ended."""
        entry = self.entries.get(seq_id)
        if entry is not None and encode_operation(entry.operation) == encode_operation(operation):
            return "same"
        if self.ended:
            return "ended"
        return "new" if entry is None else "conflict"

    def accept(self, seq_id: int, operation: ops.Operation, request_id: str) -> None:
        entry = self.entries[seq_id] = Entry(operation, request_id, refusal_of(operation))
        if seq_id < self.next_seq_id:
            entry.answer = ops.Failed(message="arrived after the model had gone on")
        while (due := self.entries.get(self.next_seq_id)) is not None:
            if due.answer is None:
                due.answer = self._apply(due.operation)
            self.next_seq_id += 1

    def give_up_gap(self) -> int:
        """All that wait behind a missing number have waited long enough; return how many fail."""
        waiting = [seq_id for seq_id, entry in self.entries.items() if entry.answer is None]
        for seq_id in waiting:
            self.entries[seq_id].answer = ops.Failed(message=f"seq_id {self.next_seq_id} ")
            self.entries[seq_id].behind_a_gap = True
        if waiting:
            self.next_seq_id = max(waiting) + 1
        return len(waiting)

    def end(self) -> None:
        missing, self.ended = self.next_seq_id, True
        for entry in self.entries.values():
            if entry.answer is None:
                entry.answer = ops.Failed(message=f"seq_id {missing} ")

    def state(self) -> ModelState:
        return self.backend.capture_state(self.model_id)

    def _spoilt(self) -> bool:
        """Return whether a pass has failed since the gradient was cleared, or something that may have been one."""
        for seq_id, entry in sorted(self.entries.items(), reverse=True):
            if seq_id >= self.next_seq_id:
                continue
            failed = isinstance(entry.answer, ops.Failed)
            if entry.behind_a_gap or (failed and type(entry.operation) is ops.ForwardBackward):
                return True
            applied = entry.answer is not None and (not failed or entry.gradient_dropped)
            if applied and isinstance(entry.operation, ops.OptimStep | ops.LoadState):
                return False
        return False

    def _apply(self, operation: ops.Operation) -> ops.Result:  # noqa: C901 - one rule each
        match operation:
            case ops.CreateModel():
                self.backend.create_model(operation)
                return ops.ModelCreated(model_id=self.model_id)
            case ops.ForwardBackward() if any(POISON in datum.tokens_T for datum in operation.data):
                return KILLED
            case ops.Forward():
                return completed(operation, self.backend.forward([operation])[0])
            case ops.ForwardBackward():
                return completed(operation, self.backend.forward_backward([operation])[0])
            case ops.OptimStep() if self._spoilt():
                self.backend.drop_gradient(self.model_id)
                return ops.Failed(message="this step is discarded", gradient_dropped=True)
            case ops.OptimStep():
                return self.backend.optim_step([operation])[0]
            case ops.SaveState() if operation.path in self.checkpoints:
                return ops.Failed(message="exists already")
            case ops.SaveState():
                self.checkpoints[operation.path] = (
                    replace(self.state(), gradients={}) if self._spoilt() else self.state()
                )
                return ops.WeightsSaved(path=operation.path)
            case ops.LoadState() if operation.path not in self.checkpoints:
                return ops.Failed(message="")
            case ops.LoadState():
                saved = self.checkpoints[operation.path]
                if not operation.load_optimizer:
                    saved = replace(saved, adam_m={}, adam_v={}, gradients={}, step=0)
                self.backend.restore_state(self.model_id, saved)
                return ops.WeightsLoaded(model_id=self.model_id, path=operation.path)
            case ops.SaveForSampler():
                assert operation.sampling_session_id is not None
                self.published.append(operation.sampling_session_id)
                snapshot = self.backend.publish(self.model_id, operation.sampling_session_id)
                asyncio.run(self.backend.load_snapshot(snapshot))
                return ops.WeightsSaved(sampling_session_id=operation.sampling_session_id)
            case _:
                raise AssertionError(operation)
