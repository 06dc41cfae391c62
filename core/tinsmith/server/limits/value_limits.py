"""Refuses what the request store could not hold, before it is queued: large payloads, and large results."""

from tinsmith import operations as ops
from tinsmith.errors import UserError
from tinsmith.store.codec import largest_result
from tinsmith.store.refusals import refuse_large_metadata


def refuse_unstorable(operation: ops.Operation, max_bytes: int) -> None:
    """Raises UserError if the result could take more than `max_bytes` in the store, or the metadata are too large."""
    if isinstance(operation, ops.SaveState | ops.SaveForSampler):
        refuse_large_metadata(operation.user_metadata)
    size = largest_result(operation)
    if size > max_bytes:
        msg = f"the result could take {size} bytes, and this server stores at most {max_bytes}; {_remedy(operation)}"
        raise UserError(msg)


def refuse_large_payload(payload: bytes, max_bytes: int) -> None:
    """Raises UserError if the encoded operation takes more than `max_bytes`."""
    if len(payload) > max_bytes:
        msg = (
            f"the request takes {len(payload)} bytes in the store, and this server stores at most {max_bytes}; "
            "send less in one request"
        )
        raise UserError(msg)


def _remedy(operation: ops.Operation) -> str:
    if not isinstance(operation, ops.Sample):
        return "send fewer sequences, or fewer targets per token, in one request"
    return (
        f"it is for num_samples {operation.num_samples} x max_tokens {operation.params.max_tokens} x (1 + "
        f"topk_sample_logprobs {operation.topk_sample_logprobs}), and {len(operation.prompt_P)} prompt tokens x "
        f"topk_prompt_logprobs {operation.topk_prompt_logprobs}; ask for less of them in one request"
    )
