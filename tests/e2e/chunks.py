"""Lets the SDK cut small batches into chunks, as it does with large ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import tinker


@contextmanager
def in_chunks_of(size: int, client: tinker.TrainingClient) -> Iterator[None]:
    """Send batches in chunks of this many sequences. The server's answer to the SDK decides this otherwise."""
    holder = client.holder
    config = holder._client_config  # noqa: SLF001 - the SDK takes it from nowhere else
    holder._client_config = config.model_copy(update={"fwdbwd_max_chunk_len": size})  # noqa: SLF001
    try:
        yield
    finally:
        holder._client_config = config  # noqa: SLF001
