"""Recording the results of operations and their effects, in one transaction."""

from collections.abc import Sequence

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Operation
from tinsmith.memory_store.subjects import checkpoints, engines, log, metrics, rollouts, runs, sampling, usage
from tinsmith.operations import Failed
from tinsmith.store import (
    CheckpointWritten,
    Completion,
    Effect,
    ExpertsSampled,
    Lease,
    LoraResolved,
    OperationState,
    Origin,
    RecoveryPointTaken,
    RolloutsRow,
    RolloutsTrained,
    RunStateChanged,
    SamplingSessionCreated,
    refusals,
)


def complete(memory: Memory, lease: Lease, completions: Sequence[Completion]) -> None:
    engines.fence(memory, lease)
    running = [(memory.unfinished.get(each.request_id), each) for each in completions]
    ours = [(row, each) for row, each in running if row and row.is_running and row.engine_id == lease.engine_id]
    for row, completion in sorted(ours, key=lambda each: each[0].id):
        _complete(memory, row, _unless_taken(memory, completion))


def _complete(memory: Memory, row: Operation, completion: Completion) -> None:
    row.ran_at, row.run_s, row.first_token_s = completion.ran_at, completion.run_s, completion.first_token_s
    failed = isinstance(completion.result, Failed) and not completion.applied
    log.finish(memory, row, completion.result, None if failed else OperationState.SUCCEEDED)
    for effect in completion.effects:
        _apply(memory, effect)
    run = memory.runs.get(row.record.subject_id)
    if row.record.ordered and run is not None:
        run.change(
            applied_seq_id=max(run.record.applied_seq_id, row.record.seq_id),
            steps=max(run.record.steps, completion.steps),
        )
        if completion.measured is not None:
            metrics.keep(memory, run, row.record.seq_id, completion.measured)
    usage.count(memory, row.record, completion)


def _unless_taken(memory: Memory, completion: Completion) -> Completion:
    """Return the completion, or a failure if it creates a sampling session that exists."""
    for effect in completion.effects:
        if isinstance(effect, SamplingSessionCreated):
            first = memory.samplers.get(wanted := effect.record.sampling_session_id)
            if first is not None:
                error = refusals.taken(wanted, first.snapshot_id or first.base_model)
                failed = Failed(message=str(error), category=error.category)
                return Completion(request_id=completion.request_id, result=failed)
    return completion


def _apply(memory: Memory, effect: Effect) -> None:
    """Applying an effect twice changes nothing."""
    match effect:
        case RunStateChanged():
            if (run := memory.runs.get(effect.model_id)) is not None:
                runs.change_state(memory, run, effect.state, effect.reason)
        case LoraResolved():
            memory.run(effect.model_id).change(lora=effect.lora)
        case CheckpointWritten():
            checkpoints.write(memory, effect.record)
        case SamplingSessionCreated():
            memory.samplers[effect.record.sampling_session_id] = effect.record
        case RecoveryPointTaken():
            memory.run(effect.record.model_id).keep_newest(effect.record, effect.keep)
        case ExpertsSampled():
            sampling.keep_experts(memory, effect)
        case RolloutsTrained():
            row = RolloutsRow(step=effect.step, seq_id=effect.seq_id, number=effect.number, content=effect.content)
            rollouts.keep(memory.run(effect.model_id), row, effect.max_bytes)
        case Origin():
            memory.run(effect.model_id).origins.setdefault(effect.seq_id, effect)
