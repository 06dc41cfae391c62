"""The ids of sampled sequences, by which the provenance spans of training requests name them.

A server stores nothing for them. The id of a sequence sampled with `record_stability_info` holds what the checks need,
and a signature: of this store, for one tenant. So it means the same on every server of the store, and after a restart.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from tinsmith.errors import UserError
from tinsmith.protocol import stable_reinforce
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.protocol.training_request import TrainingRequest
from tinsmith.store.request_ids import created_at

_PLAIN: Final = re.compile(r"(req-[0-9a-f]{14}-[0-9a-f]{24}):(\d{1,9})")
_RECORDED: Final = re.compile(rf"({_PLAIN.pattern}:(\d{{1,9}})):([0-9a-f]{{32}})")
_SIGNATURE_BYTES: Final = 16


class SequenceIds:
    def __init__(self, secret: bytes, lifetime_s: float) -> None:
        """`secret` is shared by all servers on one store."""
        self._secret = secret
        self._lifetime = timedelta(seconds=lifetime_s)

    def of_sample(self, tenant: str, request_id: str, num_samples: int, *, recorded_prompt: int | None) -> list[str]:
        """Return one id for each sequence; a repeated request gets the same ones.

        `recorded_prompt`: the number of prompt tokens, if the request has `record_stability_info`.
        """
        ids = [f"{request_id}:{index}" for index in range(num_samples)]
        if recorded_prompt is None:
            return ids
        signed = [f"{each}:{recorded_prompt}" for each in ids]
        return [f"{each}:{self._signature(tenant, each)}" for each in signed]

    def problem(self, request: TrainingRequest, tenant: str, now: datetime) -> UserError | None:
        """Return why a request for `stable_reinforce` cannot have been made of the tenant's recorded sequences.

        Malformed spans are left to the translation of the request.
        """
        prompts: dict[str, int] = {}
        try:
            for index in range(len(request.data)):
                datum = request.datum(index)
                for name in ("model_input_spans", "loss_fn_input_spans"):
                    self._check(f"data[{index}]: {name}", getattr(datum, name), prompts, tenant, now)
        except UserError as error:
            return error
        return None

    def _check(
        self, what: str, spans: Iterable[pb.ProvenanceSpan], prompts: dict[str, int], tenant: str, now: datetime
    ) -> None:
        """`prompts`: the number of prompt tokens of the sequences that have been checked."""
        for span in spans:
            prompt = span.WhichOneof("span") == "prompt_tokens"
            run = span.prompt_tokens if prompt else span.sampled_tokens
            if not run.sequence_id:
                continue
            if run.sequence_id not in prompts:
                prompts[run.sequence_id] = self._prompt_of(what, run.sequence_id, tenant, now)
            length = prompts[run.sequence_id]
            if prompt and run.offset + run.length > length:
                msg = (
                    f"{what}: a span of {run.length} tokens from {run.offset} on is not in the prompt of sequence "
                    f"{run.sequence_id!r}, which has {length} tokens"
                )
                raise UserError(msg)

    def _prompt_of(self, what: str, sequence_id: str, tenant: str, now: datetime) -> int:
        """Return the number of a sequence's prompt tokens. Raises UserError if it is not known."""
        if _PLAIN.fullmatch(sequence_id):
            msg = (
                f"{what}: sequence {sequence_id!r} was sampled without record_stability_info, which "
                f"{stable_reinforce.NAME!r} needs; create the sampling client with record_stability_info=True"
            )
            raise UserError(msg)
        found = _RECORDED.fullmatch(sequence_id)
        sampled_at = None if found is None else created_at(found[2])
        if found is None or sampled_at is None or not hmac.compare_digest(found[5], self._signature(tenant, found[1])):
            msg = (
                f"{what}: sequence {sequence_id[:120]!r} is not known; pass the sequence_id of a sequence that you "
                "sampled from this server with record_stability_info"
            )
            raise UserError(msg)
        if now - sampled_at > self._lifetime:
            msg = (
                f"{what}: sequence {sequence_id!r} has expired: it was sampled at {sampled_at:%Y-%m-%d %H:%M:%S} UTC, "
                f"and sequence ids live for {self._lifetime.total_seconds():g} s (`losses.sequence_lifetime_s`); "
                "sample again"
            )
            raise UserError(msg)
        return int(found[4])

    def _signature(self, tenant: str, signed: str) -> str:
        content = f"{tenant}\0{signed}".encode()
        return hmac.new(self._secret, content, hashlib.sha256).digest()[:_SIGNATURE_BYTES].hex()
