"""The rollouts of RL steps: sequences that were trained, and their rewards."""

from collections.abc import Mapping

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Run
from tinsmith.store import OF_CLIENT, RolloutsRow
from tinsmith.store.rollouts import row_bytes, with_rewards


def keep(run: Run, row: RolloutsRow, max_bytes: int) -> None:
    """Keep a row of rollouts, in place of the one with its step and seq_id. Drop the oldest beyond `max_bytes`."""
    run.rollouts[row.step, row.seq_id] = row
    sizes = {key: row_bytes(run.record.model_id, each.content) for key, each in sorted(run.rollouts.items())}
    total = sum(sizes.values())
    for key, size in sizes.items():
        if total > max_bytes:
            del run.rollouts[key]
            total -= size
    run.change(rollout_bytes=total)


def log_rewards(memory: Memory, model_id: str, step: int, rewards: Mapping[bytes, float], max_bytes: int) -> None:
    run = memory.run(model_id)
    before = run.rollouts.get((step, OF_CLIENT))
    content = with_rewards(None if before is None else before.content, step, rewards)
    keep(run, RolloutsRow(step=step, seq_id=OF_CLIENT, number=0, content=content), max_bytes)


def steps(memory: Memory, model_id: str) -> list[int]:
    run = memory.runs.get(model_id)
    return sorted({step for step, seq_id in (run.rollouts if run is not None else ()) if seq_id != OF_CLIENT})


def read(memory: Memory, model_id: str, step: int) -> list[RolloutsRow]:
    run = memory.runs.get(model_id)
    return [row for key, row in sorted(run.rollouts.items()) if key[0] == step] if run is not None else []
