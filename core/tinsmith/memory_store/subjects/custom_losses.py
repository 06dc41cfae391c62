"""Losses that clients have sent. They are deleted with their session."""

from tinsmith.memory_store.memory import Memory
from tinsmith.store import refusals


def create(memory: Memory, session_id: str, number: int, content: bytes) -> None:
    if memory.custom_losses.setdefault((session_id, number), content) != content:
        raise refusals.used_for_another_loss(session_id, number)


def get(memory: Memory, session_id: str, number: int) -> bytes:
    if (session_id, number) not in memory.custom_losses:
        raise refusals.missing("custom loss", refusals.custom_loss_id(session_id, number))
    return memory.custom_losses[session_id, number]
