"""The store, for routing replay: the experts of sampled sequences, found by the tokens that they computed.

An engine records them with the samples (`ExpertsSampled`). A server looks up the sequences that a client trains on, and
makes what it finds part of the training operation, so that a replay of the log needs nothing else.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import numpy as np

from tinsmith.operations import ExpertArray, TokenArray
from tinsmith.store import compression


class RoutedExperts(ABC):
    @abstractmethod
    async def find_routed_experts(self, tenant: str, model_id: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return what is kept of sequences that this tenant sampled from this model, by digest.

        `prune` deletes what was recorded before the time that it is given.
        """


def digest_of(tokens: TokenArray) -> bytes:
    """Return what identifies a sequence of tokens."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").data).digest()


def encode_experts(experts: ExpertArray) -> bytes:
    return compression.compress(msgspec.msgpack.encode(compression.narrow(experts)))


def decode_experts(stored: bytes) -> ExpertArray:
    """Return a read-only array. Raise ValueError if the bytes are damaged."""
    packed = compression.decompress(stored)
    return compression.widen(msgspec.msgpack.decode(packed))
