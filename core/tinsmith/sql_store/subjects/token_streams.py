"""Tokens of samples that are being drawn: messages over the channel of the wake-ups, and no row."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.store import DrawnTokens
from tinsmith.store.wakeups import drawn_topic, message


def tell(tx: Transaction, pieces: Sequence[DrawnTokens]) -> None:
    """The transaction writes nothing: its commit tells."""
    tx.wake.extend(message(drawn_topic(each.sampling_session_id, each.seq_id), each.encoded()) for each in pieces)


def listen(
    connections: Connections, sampling_session_id: str, seq_id: int, hear: Callable[[DrawnTokens], None]
) -> AbstractContextManager[None]:
    decoded = partial(DrawnTokens.decoded, sampling_session_id, seq_id)
    return connections.wakeups.listen(drawn_topic(sampling_session_id, seq_id), lambda text: hear(decoded(text)))
